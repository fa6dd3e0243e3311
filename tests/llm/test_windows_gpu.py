"""Layers with windows on a GPU: tokens of the CPU's engine, cold is warm to the bit, and nothing is late."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from window_helpers import (
    CUT,
    GREEDY,
    LONG,
    PARAMS,
    PENALISED,
    PROMPTS,
    MakeLLM,
    assert_clean,
    model_maker,
    one_by_one,
    scarce,
)
from window_models import OWN, WINDOWED, write_model

from octavo import RequestOutput, SamplingParams
from octavo.engine.step.result import LateWork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
QUIET = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ALL_QUIET = [QUIET] * len(PROMPTS)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("windows")
    return cache(lambda name: write_model(root / name, name))


@pytest.fixture(scope="module")
def make(folder_of: Callable[[str], Path]) -> MakeLLM:
    return model_maker(folder_of, device="cuda", dtype="float32", block_size=16)


@pytest.fixture(scope="module")
def expected(folder_of: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """The tokens of one request at a time on the CPU."""
    make = model_maker(folder_of, device="cpu", dtype="float32", enable_prefix_caching=False)
    return cache(lambda name: tokens(one_by_one(make(name), PROMPTS, ALL_QUIET)))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """Everything that a request gives back."""
    return (
        [(list(own.token_ids), own.logprobs) for own in output.outputs],
        output.prompt_logprobs,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"share_prefixes": False}, {"max_num_batched_tokens": 16}, {"block_size": 64}],
    ids=str,
)
@pytest.mark.parametrize("name", OWN)
def test_tokens_are_those_of_the_cpu(
    make: MakeLLM, expected: Callable[[str], list[list[int]]], name: str, options: dict[str, Any]
) -> None:
    """Cold and warm, with the forest on and off."""
    llm = make(name, **options)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, ALL_QUIET)) == expected(name)
    assert llm.stats.kv.prefix_hit_tokens > 0 or options.get("block_size") == 64
    assert_clean(llm)


@pytest.mark.parametrize("name", OWN)
def test_preemption_on_a_gpu_changes_no_token(
    make: MakeLLM, expected: Callable[[str], list[list[int]]], name: str
) -> None:
    llm = make(name, block_size=4, num_blocks=scarce(make(name, block_size=4)) + 2)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, ALL_QUIET)) == expected(name)
    assert llm.stats.num_preemptions > 0
    assert_clean(llm)


@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 4), ("bfloat16", 4), ("bfloat16", 16)])
@pytest.mark.parametrize("name", WINDOWED)
def test_cold_is_warm_to_the_bit_at_every_cut_of_three_windows(
    make: MakeLLM, name: str, dtype: str, block_size: int
) -> None:
    llm = make(name, deterministic=True, dtype=dtype, block_size=block_size)
    answered = [*CUT, *tokens(llm.generate([CUT], GREEDY))[0]]
    num_hit = 0
    for num_shared in range(1, len(answered) + 1):
        prompt = [*answered[:num_shared], 4, 5]
        llm.reset_prefix_cache()
        cold = llm.generate([prompt], GREEDY)[0]
        assert cold.num_cached_tokens == 0
        llm.reset_prefix_cache()
        llm.generate([CUT], GREEDY)
        warm = llm.generate([prompt], GREEDY)[0]
        num_hit += warm.num_cached_tokens
        assert bits(warm) == bits(cold), f"{num_shared} tokens shared, {warm.num_cached_tokens} hit"
    assert num_hit > 0
    assert_clean(llm)


@pytest.mark.parametrize("name", WINDOWED)
def test_company_and_forks_change_no_bit(make: MakeLLM, name: str) -> None:
    """Each request alone and cold, then all together, twice, in chunks, and one by one again."""
    llm, cold = make(name, deterministic=True), []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm.reset_prefix_cache()
        cold.append(bits(llm.generate([prompt], params)[0]))
    chunked = make(name, deterministic=True, max_num_batched_tokens=16)
    for engine in (llm, chunked):
        for _ in range(2):
            assert [bits(output) for output in engine.generate(PROMPTS, PARAMS)] == cold
        assert_clean(engine)


@pytest.mark.parametrize("options", [{}, {"share_prefixes": False}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("name", OWN)
def test_nothing_is_compiled_or_captured_late(make: MakeLLM, name: str, options: dict[str, Any]) -> None:
    llm = make(name, prepare=True, dtype="bfloat16", **options)
    for num in (1, 3, len(PROMPTS)):
        llm.generate(PROMPTS[:num], PARAMS[:num])
        llm.generate(PROMPTS[:num], ALL_QUIET[:num])
    crowd = [[*LONG[: 2 + index], index + 3] for index in range(40)]
    llm.generate(crowd, PENALISED)
    llm.generate(crowd, QUIET)
    assert llm.stats.late_work == LateWork(0, 0, 0)
    assert_clean(llm)
