"""The embedded model in the blocks of its file, which is how users meet it on a CPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from llm_helpers import assert_drained

from octavo import LLM, SamplingParams
from octavo.layers.block import PlainInput
from octavo.layers.cpu.blocks import compile_failure
from octavo.layers.linear.blocks import BlockLinear

pytestmark = pytest.mark.skipif(compile_failure() is not None, reason="needs a C compiler")

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
TEXT = (
    "The Moon is Earth's only natural satellite. It orbits at an average distance of 384,400 kilometres, "
    "about 30 times Earth's diameter. Tidal forces between Earth and the Moon have synchronised the Moon's "
    "orbital period with its rotation, so that the same side always faces Earth."
)


@pytest.fixture(scope="module")
def packed() -> Iterator[LLM]:
    llm = LLM("smollm2", num_blocks=1024)
    yield llm
    assert_drained(llm)


def test_it_takes_the_bytes_of_its_file(packed: LLM) -> None:
    layers = packed.engine.runner.decoder.layers
    for layer in layers:
        for block in (layer.attention.qkv_proj, layer.feed_forward.gate_up_proj):
            assert isinstance(block, PlainInput)
            assert isinstance(block.projection, BlockLinear)
    assert packed.engine.plan.num_parameters == 134_515_008
    assert packed.engine.plan.weight_bytes < 0.8 * packed.engine.plan.num_parameters


def test_a_text_is_as_likely_as_in_float32(packed: LLM, smollm2: LLM) -> None:
    """Mean log-probabilities, in nats a token: the rounding of activations costs little."""
    scores = []
    for llm in (packed, smollm2):
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
    packed: LLM, golden: list[dict]
) -> None:
    """Margins are the reference's, in nats, between its best two tokens."""
    outputs = packed.generate([row["prompt_ids"] for row in golden], replace(GREEDY, max_tokens=16))
    for output, row in zip(outputs, golden, strict=True):
        pairs = zip(output.outputs[0].token_ids, row["output_ids"][:16], strict=True)
        differing = [index for index, (actual, exact) in enumerate(pairs) if actual != exact]
        assert not differing or row["margins"][differing[0]] < 0.5


def test_no_neighbour_changes_an_answer(packed: LLM, golden: list[dict]) -> None:
    prompts = [row["prompt_ids"] for row in golden[:5]]
    params = replace(GREEDY, max_tokens=8)
    together = [output.outputs[0].token_ids for output in packed.generate(prompts, params)]
    packed.reset_prefix_cache()
    assert [packed.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts] == together
