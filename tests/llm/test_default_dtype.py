"""Results do not depend on PyTorch's default dtype, which other code in a process may have set."""

import pytest
import torch
from llm_cases import GREEDY, PROMPTS, MakeLLM, ids

from octavo import LLM, SamplingParams

# Log-probabilities, penalties and draws need tensors of their own.
DRAWN = SamplingParams(seed=7, max_tokens=6, ignore_eos=True, repetition_penalty=1.2, logprobs=2, top_p=0.9)


def answers(llm: LLM) -> list[list[list[int]]]:
    return [ids(llm.generate(PROMPTS, params)) for params in (GREEDY, DRAWN)]


OPTIONS = [{}, {"quantization": "int8"}, {"quantization": "bf16"}, {"attention_impl": "torch"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_with_another_default_dtype(tiny: MakeLLM, options: dict[str, object]) -> None:
    expected = answers(tiny(**options))
    # Buffers of it are too large, where those of a 16-bit dtype would be too small.
    torch.set_default_dtype(torch.float64)
    try:
        assert answers(tiny(**options)) == expected
    finally:
        torch.set_default_dtype(torch.float32)
