"""Head norms, rotation and the store of keys and values on a GPU against plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_layer_cases import PLACES, assert_as_good_as_torch, everywhere, plain_norm, random

from octavo.attention import KVCache
from octavo.errors import InvalidArgumentError


def rotary_table(
    inverse_frequencies: torch.Tensor, attention_factor: float, num_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, each [num_positions, D / 2] float32."""
    positions = torch.arange(num_positions, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies
    return angles.cos().mul_(attention_factor), angles.sin().mul_(attention_factor)


class QKVCase:
    """One call of rotate_and_store and what plain torch makes of it."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        block_size: int = 4,
        norm: bool = True,
        slots: tuple[int, ...] = (9, -1, 3, 14, 0),
        slot_dtype: torch.dtype = torch.int64,
        float8: bool = False,
        rotary_dim: int | None = None,
        value_norm: float | None = None,
        keys_are_values: bool = False,
        shares_cache: bool = False,
    ) -> None:
        self.num_heads, self.num_kv_heads = heads
        self.head_dim, self.block_size = head_dim, block_size
        self.eps = 1e-6
        self.value_norm, self.keys_are_values, self.shares_cache = value_norm, keys_are_values, shares_cache
        self.num_keys = 0 if shares_cache else heads[1]
        num_tokens, num_all = len(slots), heads[0] + self.num_keys * (2 - keys_are_values)
        # A strided view: rows of a wider tensor.
        self.qkv = random(num_tokens, num_all * head_dim + 8, device=device, dtype=dtype)[:, :-8]
        positions = [0, 5, 99, 2, 31][:num_tokens]
        self.slot_mapping = torch.tensor(slots, dtype=slot_dtype, device=device)
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
        if rotary_dim is not None:
            frequencies[rotary_dim // 2 :] = 0
        # Rows of a wider table, of which only the first D / 2 columns are read.
        tables = rotary_table(frequencies, 1.25, 100)
        self.cos, self.sin = (torch.nn.functional.pad(table[positions], (0, 3)) for table in tables)
        self.norm_weight = random(heads[0] + self.num_keys, head_dim, device=device, seed=1) if norm else None
        num_blocks = max(slots) // block_size + 2
        cache = KVCache.allocate(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=heads[1],
            head_dim=head_dim,
            dtype=torch.float8_e4m3fn if float8 else dtype,
            device=device,
        )
        cache.data.fill_(7.0)
        self.k_cache, self.v_cache = cache.layer(0).k, cache.layer(0).v

    def run(
        self, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None, keep_k: bool = False
    ) -> Tensor:
        from octavo.attention.step.rotate_store import rotate_and_store

        return rotate_and_store(
            self.qkv,
            self.slot_mapping,
            self.cos,
            self.sin,
            self.k_cache,
            self.v_cache,
            num_heads=self.num_heads,
            norm_weight=self.norm_weight,
            eps=self.eps,
            keep_k=keep_k,
            k_scale=k_scale,
            v_scale=v_scale,
            value_norm=self.value_norm,
            keys_are_values=self.keys_are_values,
            shares_cache=self.shares_cache,
        )

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, KH, D], computed in `dtype`."""
        heads = self.qkv.unflatten(1, (-1, self.head_dim)).to(dtype)
        num_rotated = self.num_heads + self.num_keys
        rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.keys_are_values:
            keys = heads[:, self.num_heads :]
            v = torch.cat((keys[..., ::2], keys[..., 1::2]), -1)
        if self.value_norm is not None:
            v = plain_norm(v, torch.ones(self.head_dim, dtype=dtype, device=v.device), self.value_norm)
        if self.norm_weight is not None:
            rotated = plain_norm(rotated, self.norm_weight, self.eps)
        rotated = self._rotate(rotated, dtype)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], v

    def _rotate(self, heads: Tensor, dtype: torch.dtype) -> Tensor:
        cos, sin = (table[:, None, : self.head_dim // 2].to(dtype) for table in (self.cos, self.sin))
        first, second = heads[..., ::2], heads[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

    def assert_right(self) -> None:
        """Run and compare q, what must stay as it was, and the whole caches."""
        exact, same_dtype = self.expected(torch.float64), self.expected(self.qkv.dtype)
        before = self.qkv.clone()
        q = self.run()
        q_size = self.num_heads * self.head_dim
        assert q.data_ptr() == self.qkv.data_ptr()
        assert torch.equal(q.flatten(1), self.qkv[:, :q_size])
        assert torch.equal(self.qkv[:, q_size:], before[:, q_size:])
        assert_as_good_as_torch(q, same_dtype[0], exact[0])
        for cache, plain, right in zip((self.k_cache, self.v_cache), same_dtype[1:], exact[1:], strict=True):
            self._assert_stored(cache, plain, right)

    def _assert_stored(self, cache: Tensor, same_dtype: Tensor, exact: Tensor) -> None:
        wanted = torch.full(cache.shape, 7.0, dtype=torch.float64, device=cache.device)
        allowed = wanted.to(cache.dtype)
        for token, slot in enumerate(self.slot_mapping.tolist()):
            if slot >= 0 and not self.shares_cache:
                wanted[slot // self.block_size, slot % self.block_size] = exact[token]
                allowed[slot // self.block_size, slot % self.block_size] = same_dtype[token]
        assert_as_good_as_torch(cache, allowed, wanted)


@everywhere
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 2), 16), ((9, 3), 64), ((7, 1), 80), ((16, 8), 128), ((1, 1), 2)]
)
def test_rotate_and_store(
    device: str, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, norm: bool
) -> None:
    QKVCase(device, dtype, heads=heads, head_dim=head_dim, norm=norm).assert_right()


@everywhere
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 16), ((7, 1), 80), ((8, 1), 512), ((4, 2), 256)])
@pytest.mark.parametrize(
    "layer",
    [
        {"value_norm": 1e-6},
        {"keys_are_values": True},
        {"keys_are_values": True, "value_norm": 1e-6},
        {"shares_cache": True},
        {"shares_cache": True, "value_norm": 1e-6},
    ],
)
def test_values_that_are_normed_or_are_keys_or_are_of_another_layer(
    device: str, dtype: torch.dtype, layer: dict[str, Any], heads: tuple[int, int], head_dim: int, norm: bool
) -> None:
    QKVCase(device, dtype, heads=heads, head_dim=head_dim, norm=norm, **layer).assert_right()


@everywhere
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 20), (512, 128), (512, 0)])
def test_dimensions_that_do_not_turn(device: str, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    QKVCase(device, dtype, heads=(4, 2), head_dim=head_dim, rotary_dim=rotary_dim).assert_right()


@everywhere
def test_keys_can_be_kept_in_place_too(device: str, dtype: torch.dtype) -> None:
    case = QKVCase(device, dtype, heads=(6, 2), head_dim=128)
    exact, same_dtype = case.expected(torch.float64), case.expected(dtype)
    before = case.qkv.clone()
    case.run(keep_k=True)
    q, k = case.qkv.unflatten(1, (-1, 128))[:, :8].split((6, 2), 1)
    assert_as_good_as_torch(q, same_dtype[0], exact[0])
    assert_as_good_as_torch(k, same_dtype[1], exact[1])
    assert torch.equal(case.qkv[:, 8 * 128 :], before[:, 8 * 128 :])


@pytest.mark.parametrize("device", [pytest.param(place.values[0], marks=place.marks) for place in PLACES[:1]])
@pytest.mark.parametrize(("length", "head_dim"), [(1.0, 80), (1.25, 80), (1.25, 112), (1.0, 512)])
def test_rotation_table(device: str, length: float, head_dim: int) -> None:
    from octavo.attention.step.rotate_store import rotation_table
    from octavo.layers.rotary import Rotary

    frequencies = 10000.0 ** (-torch.arange(0, 80, 2, device=device) / 80)
    positions = torch.tensor([0, 1, 17, 40959, 131071, 5, 6] * 5, dtype=torch.int32, device=device)
    rotary = Rotary(frequencies, length, head_dim)
    wanted = torch.view_as_real(rotary(positions)[:, 0]).permute(2, 0, 1)
    got = rotation_table(positions, rotary.inverse_frequencies, rotary.lengths)
    torch.testing.assert_close(got, wanted.contiguous(), rtol=0, atol=1e-6)
    # Pairs that do not turn are multiplied by exactly 1.
    assert bool((got[0, :, 40:] == 1).all())
    assert not bool(got[1, :, 40:].any())


@everywhere
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_slot_minus_one_writes_nothing(device: str, dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    """Trap: -1 padding reaching address arithmetic."""
    case = QKVCase(device, dtype, slots=(-1, -1, -1), slot_dtype=slot_dtype)
    case.run()
    assert (case.k_cache == 7).all()
    assert (case.v_cache == 7).all()


@everywhere
def test_any_cache_layout(device: str, dtype: torch.dtype) -> None:
    """The drop-in API's caches are [block, token, kv head, dim] in memory."""
    case = QKVCase(device, dtype, block_size=3)
    case.k_cache, case.v_cache = case.k_cache.contiguous(), case.v_cache.permute(2, 0, 1, 3).contiguous()
    case.v_cache = case.v_cache.permute(1, 2, 0, 3)
    case.assert_right()


@everywhere
def test_float8_cache(device: str, dtype: torch.dtype) -> None:
    """Scaled keys and values, some of them too large for float8, which saturates."""
    case = QKVCase(device, dtype, norm=False, float8=True)
    case.qkv[1:3] *= 3000
    k_scale, v_scale = torch.tensor([[0.5, 1.0], [2.0, 4.0]], device=device)
    case.run(k_scale=k_scale, v_scale=v_scale)
    _, k, v = case.expected(torch.float64)
    for token, slot in enumerate(case.slot_mapping.tolist()):
        if slot >= 0:
            at = (slot // case.block_size, slot % case.block_size)
            exact_k = (k[token] / k_scale[:, None]).clamp(-448, 448)
            exact_v = (v[token] / v_scale[:, None]).clamp(-448, 448)
            assert torch.equal(case.v_cache[at].float(), exact_v.to(torch.float8_e4m3fn).float())
            # Half a unit in the last place, and a little more: a rotated key may lie close to a tie.
            bound = exact_k.abs() * 2**-4 * 1.01 + 2**-10
            assert ((case.k_cache[at].double() - exact_k).abs() <= bound).all()
    assert case.k_cache.float().abs().max() == 448


@everywhere
def test_refuses_scales_that_do_not_fit(device: str, dtype: torch.dtype) -> None:
    case = QKVCase(device, dtype, float8=True)
    with pytest.raises(InvalidArgumentError, match="k_scale must be contiguous"):
        case.run(k_scale=torch.ones(3, device=device), v_scale=torch.ones(2, device=device))


@everywhere
def test_addresses_beyond_two_to_the_31(device: str, dtype: torch.dtype) -> None:
    """Trap: int32 address arithmetic. A huge stride stands in for a huge cache."""
    case = QKVCase(device, dtype, heads=(1, 1), block_size=1, slots=(3,))
    stride = 2**30 + 64
    # Untouched pages of an empty allocation cost no memory on a CPU.
    flat = torch.empty(3 * stride + 32, dtype=torch.float16 if device == "cpu" else dtype, device=device)
    case.qkv, case.norm_weight = case.qkv.to(flat.dtype), None
    case.k_cache = flat.as_strided((4, 1, 1, 16), (stride, 16, 16, 1))
    case.v_cache = flat[16:].as_strided((4, 1, 1, 16), (stride, 16, 16, 1))
    case.run()
    assert torch.equal(case.v_cache[3, 0, 0], case.qkv[0, -16:])
    assert torch.allclose(case.k_cache[3, 0].double(), case.expected(torch.float64)[1][0], atol=0.02)


@everywhere
def test_rotate_and_store_refuses_what_does_not_fit(device: str, dtype: torch.dtype) -> None:
    for name, message in (
        ("qkv", "qkv must be"),
        ("cos", "cos and sin"),
        ("norm_weight", "norm_weight must be"),
    ):
        case = QKVCase(device, dtype)
        setattr(case, name, getattr(case, name)[:, :-1])
        with pytest.raises(InvalidArgumentError, match=message):
            case.run()
    case = QKVCase(device, dtype)
    case.cos, case.sin = case.cos[:-1], case.sin[:-1]
    with pytest.raises(InvalidArgumentError, match="cos and sin"):
        case.run()
    case = QKVCase(device, dtype)
    case.v_cache = case.v_cache[1:]
    with pytest.raises(InvalidArgumentError, match="k_cache and v_cache"):
        case.run()
