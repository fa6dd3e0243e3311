"""merge: partial results over disjoint keys become the result over all of them."""

import pytest
import torch

from octavo.attention import merge
from octavo.errors import InvalidArgumentError


def partials(num_parts, dtype=torch.float64, seed=0):
    """Dense attention over num_parts pieces of 30 keys, and over all of them: T=3, H=2, D=4."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(3, 2, 30, generator=generator, dtype=dtype)
    values = torch.randn(30, 4, generator=generator, dtype=dtype)
    pieces = [(scores[..., i::num_parts], values[i::num_parts]) for i in range(num_parts)]
    outs = torch.stack([s.softmax(-1) @ v for s, v in pieces])
    lses = torch.stack([s.logsumexp(-1) for s, _ in pieces])
    return outs, lses, scores.softmax(-1) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_equals_attention_over_all_keys(num_parts):
    outs, lses, out, lse = partials(num_parts)
    actual = merge(outs, lses)
    torch.testing.assert_close(actual[0], out)
    torch.testing.assert_close(actual[1], lse)


def test_an_empty_partial_is_ignored_even_if_it_holds_nan():
    outs, lses, out, lse = partials(2)
    outs = torch.cat([outs, torch.full_like(outs[:1], torch.nan)])
    lses = torch.cat([lses, torch.full_like(lses[:1], -torch.inf)])
    actual = merge(outs, lses)
    torch.testing.assert_close(actual[0], out)
    torch.testing.assert_close(actual[1], lse)


@pytest.mark.parametrize("num_parts", [0, 1, 3])
def test_all_partials_absent_give_zero_not_nan(num_parts):
    outs = torch.full((num_parts, 3, 2, 4), torch.nan)
    out, lse = merge(outs, torch.full((num_parts, 3, 2), -torch.inf))
    assert torch.equal(out, torch.zeros(3, 2, 4))
    assert torch.equal(lse, torch.full((3, 2), -torch.inf))


def test_sixteen_bit_partials_are_merged_in_float32():
    """Merging in bfloat16 would lose three more digits than the partials themselves."""
    outs, lses, out, lse = partials(5)
    actual, actual_lse = merge(outs.bfloat16(), lses.float())
    assert actual.dtype == torch.bfloat16
    assert actual_lse.dtype == torch.float32
    torch.testing.assert_close(actual_lse.double(), lse, rtol=1e-6, atol=1e-6)
    exact = merge(outs.bfloat16().double(), lses)[0]
    assert (actual.double() - exact).abs().max() <= 2**-8 * out.abs().max()


def test_lses_hundreds_apart_do_not_overflow():
    outs = torch.stack([torch.ones(1, 1, 2), torch.full((1, 1, 2), 5.0)])
    out, lse = merge(outs, torch.tensor([[[-500.0]], [[500.0]]]))
    assert torch.equal(out, torch.full((1, 1, 2), 5.0))
    assert lse.item() == 500.0


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"outs \[P, T, H, D\]"):
        merge(torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 3))
