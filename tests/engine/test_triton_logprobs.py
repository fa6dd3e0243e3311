"""Log-probabilities on a GPU against torch's, and that rows keep their bits."""

import pytest
import torch
from triton_sampling_cases import everywhere, ignores_infinities, in_all_dtypes, random_logits

pytestmark = ignores_infinities


@everywhere
@in_all_dtypes
@pytest.mark.parametrize("vocab_size", [1, 7, 4096, 4097, 49152])
def test_against_torch(device: str, dtype: torch.dtype, vocab_size: int) -> None:
    from octavo.engine.sampling.triton_logprobs import log_softmax

    logits = random_logits(3, vocab_size, device, dtype)
    got = log_softmax(logits)
    assert got.dtype == torch.float32
    assert (got <= 0).all()
    exact = logits.double().log_softmax(-1)
    plain = logits.float().log_softmax(-1)
    error, allowed = ((x - exact).abs().max().item() for x in (got, plain))
    assert error <= 2 * allowed + 1e-6 * exact.abs().max().item()


@everywhere
@in_all_dtypes
def test_a_row_has_the_same_bits_in_any_batch_and_at_any_place(device: str, dtype: torch.dtype) -> None:
    from octavo.engine.sampling.triton_logprobs import log_softmax

    # An odd width: rows begin at all places of a cache line.
    logits = random_logits(9, 5003, device, dtype)
    expected = log_softmax(logits)
    packed = logits.contiguous()
    assert torch.equal(log_softmax(packed), expected)
    for row in range(9):
        assert torch.equal(log_softmax(packed[row : row + 1])[0], expected[row])
        assert torch.equal(log_softmax(logits[row : row + 1].clone())[0], expected[row])


@everywhere
def test_forbidden_tokens_and_rows_that_are_not_finite(device: str) -> None:
    from octavo.engine.sampling.triton_logprobs import log_softmax

    logits = torch.tensor([[0.0, -torch.inf, 0.0], [torch.nan, 1.0, 2.0], [1.0, 2.0, 3.0]], device=device)
    got = log_softmax(logits)
    assert got[0, 1] == -torch.inf
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2]], logits[[0, 2]].log_softmax(-1))
    assert log_softmax(logits[:0]).shape == (0, 3)
