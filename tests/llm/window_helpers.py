"""Engines of the tiny windowed models, and what they give."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llm_helpers import assert_drained
from window_models import WINDOW

from octavo import LLM, RequestOutput, SamplingParams

MakeLLM = Callable[..., LLM]
OPTIONS: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "max_model_len": 160, "prepare": False}
LONG = [3 + (13 * i + i // 9) % 90 for i in range(9 * WINDOW)]
CUT = LONG[: 3 * WINDOW]
# They share nothing, less than a block, a window and more, all but the last token, and all. No token of a
# greedy answer is a near-tie.
PROMPTS = [LONG, [5, 8], [*LONG[:3], 9], [*LONG[: 2 * WINDOW], 7], [*LONG[:-1], 11], LONG, CUT]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
SEEDED = SamplingParams(seed=3, max_tokens=10, ignore_eos=True, top_k=20, logprobs=0, n=3)
PENALISED = SamplingParams(seed=4, max_tokens=30, ignore_eos=True, presence_penalty=0.5)
LOGGED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
PARAMS = [GREEDY, SEEDED, PENALISED, GREEDY, SEEDED, LOGGED, PENALISED]


def assert_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Tokens are equal, and log-probabilities within rounding, those of the prompt too."""
    for one, other in zip(found, expected, strict=True):
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            assert mine.token_ids == its.token_ids
            assert logprobs(mine.logprobs) == pytest.approx(logprobs(its.logprobs), abs=1e-4)
        assert logprobs(one.prompt_logprobs) == pytest.approx(logprobs(other.prompt_logprobs), abs=1e-4)


def logprobs(entries: Any) -> dict[tuple[int, int], float]:
    """Log-probabilities by position and token."""
    return {
        (position, token): entry.logprob
        for position, listed in enumerate(entries or [])
        for token, entry in (listed or {}).items()
    }


def one_by_one(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Run each request by itself, in an engine without prefix caching."""
    assert not llm.engine.manager.enable_prefix_caching
    return [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]


def assert_clean(llm: LLM) -> None:
    """No block is lost: all of them are free once nothing is cached."""
    assert_drained(llm)
    llm.reset_prefix_cache()
    assert llm.stats.kv.num_free == llm.stats.kv.num_blocks
    llm.engine.manager.check_invariants()


def scarce(llm: LLM, num_tokens: int = 90) -> int:
    """Return so few pages that a request of so many tokens just fits them by itself."""
    return llm.engine.manager.layout.num_pages(num_tokens)


def model_maker(folder_of: Callable[[str], Path], **common: Any) -> MakeLLM:
    """Return a function that makes an engine of a model of OWN, with further options."""
    return lambda name, **options: LLM(str(folder_of(name)), **{**OPTIONS, **common, **options})
