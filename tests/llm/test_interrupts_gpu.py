"""Interrupts while a GPU is a step behind: what it still works on never reaches a later answer."""

import random

import pytest
import torch
from alarms import alarm
from interrupt_helpers import PARAMS, PROMPTS, SEED, STREAM_PARAMS, STREAMED, MakeLLM
from llm_helpers import assert_drained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.timeout(600, method="thread")
def test_interrupts_at_random_moments(tiny: MakeLLM) -> None:
    """A timer's signal a thousand times: the tokens of undisturbed runs, a sound pool, nothing left."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    llm = tiny(device="cuda", dtype="float32", num_blocks=64, max_num_batched_tokens=64)

    def tokens() -> list[list[list[int]]]:
        return [[c.token_ids for c in output.outputs] for output in llm.generate(PROMPTS, PARAMS)]

    expected = tokens()
    expected_stream = llm.generate(STREAMED, STREAM_PARAMS)[0].outputs[0].token_ids
    assert tokens() == expected
    num_interrupts = 0
    with alarm() as it:
        while num_interrupts < 1000:
            stream = llm.stream(STREAMED, STREAM_PARAMS)
            seen = list(next(stream).token_ids)
            for _ in range(rng.randrange(1, 6)):
                num_interrupts += it.interrupts(tokens, rng.random() * 0.03 + 1e-5)
            seen += [token for delta in stream for token in delta.token_ids]
            assert seen == expected_stream
            assert_drained(llm)
            if rng.random() < 0.1:
                assert tokens() == expected
    assert tokens() == expected
    assert_drained(llm)
