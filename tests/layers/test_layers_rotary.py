import math

import pytest
import torch

from octavo.layers import RopeConfig, Rotary, interleave_halves, inverse_frequencies, rotate_


def rotate_halves(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The checkpoint's own convention, written out in float64."""
    first, second = heads.double().chunk(2, -1)
    cos, sin = angles.double().cos(), angles.double().sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def interleaved(heads: torch.Tensor) -> torch.Tensor:
    return heads.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("head_dim", [4, 6, 64])
def test_rotation_equals_rotate_half_on_reordered_heads(
    head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    positions = torch.tensor([0, 1, 7, 300], dtype=torch.int32)
    frequencies, _ = inverse_frequencies(RopeConfig(theta=10_000.0), head_dim, 512)
    fused = torch.randn(4, 5, head_dim).to(dtype)
    heads = interleaved(fused)
    rotate_(heads[:, :3], Rotary(frequencies, 1.0)(positions))

    expected = interleaved(rotate_halves(fused, positions[:, None, None] * frequencies))
    torch.testing.assert_close(heads[:, :3].double(), expected[:, :3], rtol=tolerance, atol=tolerance)
    assert heads[:, 3:].equal(interleaved(fused)[:, 3:])


def test_interleaving_weight_rows_interleaves_their_results() -> None:
    weight, x = torch.randn(3 * 8, 5), torch.randn(2, 5)
    plain = (x @ weight.T).unflatten(-1, (3, 8))
    torch.testing.assert_close((x @ interleave_halves(weight, 8).T).unflatten(-1, (3, 8)), interleaved(plain))
    assert interleave_halves(torch.arange(8), 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dimensions_after_those_that_turn_stay_as_they_are(dtype: torch.dtype) -> None:
    assert interleave_halves(torch.arange(16), 8, 4).tolist() == [
        0,
        2,
        1,
        3,
        4,
        5,
        6,
        7,
        8,
        10,
        9,
        11,
        *range(12, 16),
    ]
    frequencies, _ = inverse_frequencies(RopeConfig(theta=100.0), 4, 64)
    heads = torch.randn(2, 3, 8).to(dtype)
    turned = heads.clone()
    rotate_(turned, Rotary(frequencies, 1.5, head_dim=8)(torch.tensor([3, 300])))
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    alone = heads[..., :4].clone()
    rotate_(alone, Rotary(frequencies, 1.5)(torch.tensor([3, 300])))
    assert torch.equal(turned[..., :4], alone)


def test_attention_factor_scales_rotated_heads() -> None:
    heads = torch.randn(2, 1, 4)
    lengths = heads.norm(dim=-1)
    rotate_(heads, Rotary(torch.ones(2), 1.5)(torch.tensor([3, 4])))
    torch.testing.assert_close(heads.norm(dim=-1), 1.5 * lengths)


def test_explicit_factors_divide_each_frequency() -> None:
    rope = RopeConfig(theta=100.0, rope_type="factors", factors=(1.0, 2.0, 8.0, 32.0))
    plain, _ = inverse_frequencies(RopeConfig(theta=100.0), 8, 64)
    got, attention_factor = inverse_frequencies(rope, 8, 64)
    torch.testing.assert_close(plain / got, torch.tensor([1.0, 2.0, 8.0, 32.0]))
    assert attention_factor == 1.0


def test_dynamic_scaling_starts_beyond_the_original_context() -> None:
    rope = RopeConfig(theta=100.0, rope_type="dynamic", factor=2.0, original_max_positions=64)
    plain, _ = inverse_frequencies(RopeConfig(theta=100.0), 8, 64)
    assert inverse_frequencies(rope, 8, 64)[0].equal(plain)
    assert inverse_frequencies(rope, 8, 3)[0].equal(plain)
    assert inverse_frequencies(rope, 8, 65)[0][-1] < plain[-1]


def test_yarn_keeps_fast_and_stretches_slow_frequencies() -> None:
    rope = RopeConfig(theta=10_000.0, rope_type="yarn", factor=4.0, original_max_positions=2048)
    plain, _ = inverse_frequencies(RopeConfig(theta=10_000.0), 64, 64)
    got, attention_factor = inverse_frequencies(rope, 64, 64)
    ratio = plain / got
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(4.0)
    assert ratio.diff().min() >= -1e-6
    assert attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
