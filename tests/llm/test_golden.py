"""The real model gives the reference's greedy tokens, whatever the schedule."""

from dataclasses import replace

import pytest

from octavo import LLM, EngineConfig, SamplingParams
from octavo.engine.engine import Engine

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, skip_special_tokens=False)
# Of each answer in other blocks; the longer ones grow into a second block of 64.
NUM_TOKENS = 28
# Of each answer under every other schedule: prompts of 34 tokens and more grow into a fourth block of 16.
FEW_TOKENS = 15


def completions(llm: LLM, golden: list[dict], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = replace(GREEDY, max_tokens=num_tokens)
    outputs = llm.generate([row["prompt_ids"] for row in golden], params)
    return [output.outputs[0].token_ids for output in outputs]


def expected(golden: list[dict], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    return [row["output_ids"][:num_tokens] for row in golden]


def test_the_tokenizer_agrees(exact: LLM, golden: list[dict]) -> None:
    assert exact.engine.tokenizer is not None
    for row in golden:
        assert exact.engine.tokenizer.encode(row["prompt"]) == row["prompt_ids"]


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (1, 2, 3))])
def test_alone(idle_exact: LLM, golden: list[dict], first: int) -> None:
    for row in golden[first::4]:
        assert completions(idle_exact, [row], FEW_TOKENS) == expected([row], FEW_TOKENS), row["prompt"]


def test_all_together_cold_and_warm(idle_exact: LLM, golden: list[dict]) -> None:
    """Cold, whole answers and their text."""
    prompts = [row["prompt_ids"] for row in golden]
    for output, row in zip(idle_exact.generate(prompts, GREEDY), golden, strict=True):
        assert output.outputs[0].token_ids == row["output_ids"], row["prompt"]
        assert output.outputs[0].text == row["text"]
    golden = [row for row in golden if len(row["prompt_ids"]) > 16]
    params = replace(GREEDY, max_tokens=FEW_TOKENS)
    outputs = idle_exact.generate([row["prompt_ids"] for row in golden], params)
    assert [output.outputs[0].token_ids for output in outputs] == expected(golden, FEW_TOKENS)
    hits = [output.num_cached_tokens for output in outputs]
    assert hits
    assert all(num_cached > 0 for num_cached in hits), "the second run was meant to be warm"


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_every_attention_implementation(golden: list[dict], impl: str, exact: LLM) -> None:
    llm = resized(exact, num_blocks=1024, attention_impl=impl)
    assert completions(llm, golden[1:2], FEW_TOKENS) == expected(golden[1:2], FEW_TOKENS)


SOME = [(64, 7), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((1, 512), (16, 7), (16, 512)))]


@pytest.mark.parametrize(("block_size", "budget"), SOME)
def test_block_sizes_chunks_and_a_pool_that_is_too_small(
    golden: list[dict], block_size: int, budget: int, exact: LLM
) -> None:
    """Room for two of the longest of three requests: one is preempted."""
    golden = golden[1:6:2]
    longest = max(len(row["prompt_ids"]) for row in golden) + NUM_TOKENS
    num_blocks = -(-2 * longest // block_size)
    llm = resized(exact, num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=budget)
    assert completions(llm, golden) == expected(golden)
    assert llm.stats.num_preemptions > 0
    assert completions(llm, golden, FEW_TOKENS) == expected(golden, FEW_TOKENS)  # warm
    assert llm.stats.kv.num_referenced == 0


@pytest.mark.parametrize(("block_size", "budget"), SOME)
def test_block_sizes_and_chunks_without_caching(
    golden: list[dict], block_size: int, budget: int, exact: LLM
) -> None:
    golden = golden[1::4]
    llm = resized(
        exact,
        num_blocks=4096 // block_size,
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    assert completions(llm, golden) == expected(golden)
    assert llm.stats.num_preemptions == 0
    assert llm.stats.kv.num_cached == 0


def resized(llm: LLM, **options: object) -> LLM:
    """The same loaded weights behind an engine with other options."""
    config = EngineConfig.from_dict(
        {"model": "smollm2", "dtype": "float32", "quantization": "none", **options}
    )
    decoder = replace(llm.engine.runner.decoder, attention_impl=config.attention_impl)
    return LLM.from_engine(Engine(config, decoder=decoder))
