"""Results do not depend on PyTorch's default dtype, which other code in a process may have set."""

import pytest
import torch
from llm_cases import OPTIONS, MakeLLM, answers


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_with_another_default_dtype(tiny: MakeLLM, options: dict[str, object]) -> None:
    expected = answers(tiny(**options))
    # Buffers of it are too large, where those of a 16-bit dtype would be too small.
    torch.set_default_dtype(torch.float64)
    try:
        assert answers(tiny(**options)) == expected
    finally:
        torch.set_default_dtype(torch.float32)
