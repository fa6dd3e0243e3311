"""kv_cache_dtype="bf16" on a CPU: what it saves, what it costs in accuracy, what refuses it."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from test_float8_cache import TEXT, best_ids, perplexity, tokens

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.errors import ConfigError

MakeLLM = Callable[..., LLM]


def test_a_number_takes_two_bytes(tiny: MakeLLM) -> None:
    exact, half = (tiny(kv_cache_dtype=dtype).engine for dtype in ("auto", "bf16"))
    assert half.runner.kv_cache.data.dtype == torch.bfloat16
    assert half.plan.kv_bytes_per_token * 2 == exact.plan.kv_bytes_per_token
    assert half.plan.kv_bytes == half.runner.kv_cache.nbytes
    assert half.manager.bytes_per_block * 2 == exact.manager.bytes_per_block


def test_it_is_the_dtype_of_a_bfloat16_model(tiny: MakeLLM) -> None:
    same, named = (tiny(dtype="bfloat16", kv_cache_dtype=name) for name in ("auto", "bf16"))
    assert same.engine.plan.kv_dtype == named.engine.plan.kv_dtype == torch.bfloat16
    assert tokens(same) == tokens(named)


def test_narrower_models_are_refused(tiny: MakeLLM) -> None:
    with pytest.raises(
        ConfigError, match='kv_cache_dtype="bf16" runs with dtype bfloat16, on a CPU also float32'
    ):
        tiny(dtype="float16", kv_cache_dtype="bf16")


# By layers one by one, in float32; and by all layers in one call into C, whose rows in 8 bits turn any small
# difference into rounding. Perplexities of texts of this length scatter by 0.001 as keys are rounded.
@pytest.mark.parametrize(("model", "least", "most"), [("idle_exact", 0.98, 2e-3), ("smollm2", 0.9, 0.02)])
def test_costs_hardly_any_accuracy(
    model: str, least: float, most: float, request: pytest.FixtureRequest
) -> None:
    """Teacher-forced on the real model."""
    llm: LLM = request.getfixturevalue(model)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    config = dataclasses.replace(llm.engine.config, kv_cache_dtype="bf16", num_blocks=32)
    half = LLM.from_engine(Engine(config, decoder=llm.engine.runner.decoder))
    a, b = (each.generate(TEXT, params)[0] for each in (llm, half))
    agreement = sum(x == y for x, y in zip(best_ids(a), best_ids(b), strict=True)) / len(best_ids(a))
    assert agreement >= least
    assert abs(perplexity(b) / perplexity(a) - 1) < most
    assert perplexity(a) != perplexity(b)
