"""The embedded model in the blocks of its file, which is how users meet it on a CPU."""

from dataclasses import replace

import pytest

from octavo import LLM, SamplingParams
from octavo.gemm.cpu.block_linear import BlockLinear
from octavo.gemm.cpu.library import compile_failure
from octavo.layers.block import BlockInput

pytestmark = pytest.mark.skipif(compile_failure() is not None, reason="needs a C compiler")

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
TEXT = (
    "The Moon is Earth's only natural satellite. It orbits at an average distance of 384,400 kilometres, "
    "about 30 times Earth's diameter. Tidal forces between Earth and the Moon have synchronised the Moon's "
    "orbital period with its rotation, so that the same side always faces Earth."
)


def test_it_takes_the_bytes_of_its_file(smollm2: LLM) -> None:
    layers = smollm2.engine.runner.decoder.layers
    for layer in layers:
        for block in (layer.attention.qkv_proj, layer.feed_forward.gate_up_proj):
            assert isinstance(block, BlockInput)
            assert isinstance(block.projection, BlockLinear)
    assert smollm2.engine.plan.num_parameters == 134_515_008
    assert smollm2.engine.plan.weight_bytes < 0.8 * smollm2.engine.plan.num_parameters


def test_a_text_is_as_likely_as_in_float32(smollm2: LLM, exact: LLM) -> None:
    """Mean log-probabilities, in nats a token: the rounding of activations costs little."""
    scores = []
    for llm in (smollm2, exact):
        output = llm.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        assert output.prompt_logprobs is not None
        values = [
            entry[token].logprob
            for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            if entry is not None
        ]
        scores.append(sum(values) / len(values))
    assert abs(scores[0] - scores[1]) < 0.02


def test_answers_leave_the_exact_ones_only_where_two_tokens_are_close(
    smollm2: LLM, golden: list[dict]
) -> None:
    """Margins are the reference's, in nats, between its best two tokens."""
    outputs = smollm2.generate([row["prompt_ids"] for row in golden], replace(GREEDY, max_tokens=16))
    for output, row in zip(outputs, golden, strict=True):
        pairs = zip(output.outputs[0].token_ids, row["output_ids"][:16], strict=True)
        differing = [index for index, (actual, exact) in enumerate(pairs) if actual != exact]
        assert not differing or row["margins"][differing[0]] < 0.5


def test_no_neighbour_changes_an_answer(smollm2: LLM, golden: list[dict]) -> None:
    prompts = [row["prompt_ids"] for row in golden[:5]]
    params = replace(GREEDY, max_tokens=8)
    together = [output.outputs[0].token_ids for output in smollm2.generate(prompts, params)]
    smollm2.reset_prefix_cache()
    assert [smollm2.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts] == together


def test_a_scored_token_is_as_likely_as_when_it_was_decoded(idle: LLM, golden: list[dict]) -> None:
    """Not a bit of its log-probability differs, whether its row comes alone or with others."""
    params = replace(GREEDY, max_tokens=24, logprobs=0)
    for row in golden[:4]:
        decoded = idle.generate(row["prompt_ids"], params)[0].outputs[0]
        assert decoded.logprobs is not None
        ids = [*row["prompt_ids"], *decoded.token_ids]
        scored = idle.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
        assert scored is not None
        for token, seen, again in zip(
            decoded.token_ids, decoded.logprobs, scored[len(row["prompt_ids"]) :], strict=True
        ):
            assert again is not None
            assert seen[token].logprob == again[token].logprob


@pytest.mark.parametrize("max_tokens_of_a_step", [None, 7])
def test_a_cached_prefix_changes_no_continuation(
    idle: LLM, golden: list[dict], max_tokens_of_a_step: int | None
) -> None:
    params = replace(GREEDY, max_tokens=24, logprobs=0)
    llm = idle if max_tokens_of_a_step is None else LLM("smollm2", num_blocks=256, max_num_batched_tokens=7)
    for row in golden[4:8]:
        fresh = idle.generate(row["prompt_ids"], params)[0].outputs[0]
        llm.generate(row["prompt_ids"], replace(params, max_tokens=1))
        cached = llm.generate(row["prompt_ids"], params)[0]
        assert cached.outputs[0].token_ids == fresh.token_ids
        assert cached.outputs[0].logprobs == fresh.logprobs
        idle.reset_prefix_cache()
