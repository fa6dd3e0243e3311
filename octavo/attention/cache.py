"""The paged KV cache: one allocation, viewed per layer, and its rows as PyTorch reads and writes them.

A float8 (e4m3) cache stores x / scale, with one scale per kv head, saturated to +-448.
"""

from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError, OutOfMemoryError
from octavo.kernels.copies import to_device

if TYPE_CHECKING:
    # Operators use caches without any bookkeeping of blocks.
    from octavo.kv import CacheLayout

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
Index = tuple[Tensor | int, ...]

COPIED_BYTES = 256 * 2**20
"""Largest temporary copy while blocks are copied, in bytes; a single block may be larger."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, the form that every operator takes.

    Attributes:
        k: [N, B, KH, D] keys, any strides, last dimension contiguous.
        v: [N, B, KH, Dv] values, like k; their head dim may differ from that of the keys.
        k_scale: [KH] contiguous float32: in a float8 (float8_e4m3fn) cache, the key that 1.0 stands for;
            None: 1. Attention also takes [S, KH], a scale for each sequence.
        v_scale: like k_scale, the same for values; set both or neither.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers in one allocation.

    One (block, kv head) tile is contiguous. Kernels take strides, so any other layout of a LayerCache works
    too.

    Attributes:
        data: [L, 2 (k, v), N, KH, B, D], dtype of the cache; with a layout of several groups of layers
            [2 (k, v), slices, N, slice], where N is the number of pages.
        scales: [L, 2, most KH] float32: in a float8 cache, the number that 1.0 stands for; None in other
            dtypes. They must not change while the cache is in use.
        layout: where the blocks of groups of layers are; None: there is one group.
    """

    data: Tensor
    scales: Tensor | None = None
    layout: "CacheLayout | None" = None
    _layers: dict[int, LayerCache] = field(default_factory=dict, init=False, repr=False, compare=False)
    _addresses: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "KVCache":
        """Allocate an uninitialised cache; a float8 (torch.float8_e4m3fn) cache gets scales of 1.

        Raises:
            InvalidArgumentError: a size is not a positive integer, dtype is no type of floats, or there is no
                such device.
            OutOfMemoryError: the device cannot hold it.
        """
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if not isinstance(size, Integral) or size < 1:
                raise InvalidArgumentError(f"{name} must be a positive integer, got {size!r}")
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        data = _allocate(shape, dtype, device, f"{num_blocks} blocks x {block_size} tokens")
        return cls(data, _scales(num_layers, num_kv_heads, data))

    @classmethod
    def of_layout(
        cls, layout: "CacheLayout", num_pages: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        """Allocate an uninitialised cache for groups of layers; see allocate, also for errors."""
        layers = layout.layers
        if len(layout.groups) == 1 and layout.groups[0].blocks_per_page == 1:
            return cls.allocate(
                num_layers=len(layers), num_blocks=num_pages, block_size=layout.block_size,
                num_kv_heads=layers[0].num_kv_heads, head_dim=layers[0].head_dim, dtype=dtype, device=device,
            )  # fmt: skip
        shape = (2, layout.num_slices, num_pages, layout.slice_size)
        data = _allocate(shape, dtype, device, f"{num_pages} pages")
        return cls(data, _scales(len(layers), max(layer.num_kv_heads for layer in layers), data), layout)

    def layer(self, index: int) -> LayerCache:
        """Return one layer's views, the same object in every call."""
        layer = self._layers.get(index)
        if layer is None:
            k, v = self.data[index] if self.layout is None else _layer_of(self.data, self.layout, index)
            scales = () if self.scales is None else self.scales[index, :, : k.shape[1]]
            layer = self._layers[index] = LayerCache(k.transpose(1, 2), v.transpose(1, 2), *scales)
        return layer

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each group."""
        if self.layout is None:
            return (tuple(range(self.data.shape[0])),)
        return tuple(group.layers for group in self.layout.groups)

    @property
    def addresses(self) -> list[tuple[int, int]]:
        """Where the keys and the values of each layer begin in memory."""
        if not self._addresses:
            layers = map(self.layer, range(self.num_layers))
            self._addresses.extend((layer.k.data_ptr(), layer.v.data_ptr()) for layer in layers)
        return self._addresses

    @property
    def num_layers(self) -> int:
        return self.data.shape[0] if self.layout is None else len(self.layout.layers)

    @property
    def num_blocks(self) -> int:
        """Blocks, or pages of a layout."""
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        return self.data.shape[4] if self.layout is None else self.layout.block_size

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks or pages (source, destination) in every layer; used by copy-on-write.

        Raises:
            InvalidArgumentError: there is no such block; nothing was copied.
        """
        if not pairs:
            return
        for block_id in chain.from_iterable(pairs):
            if not 0 <= block_id < self.num_blocks:
                raise InvalidArgumentError(f"block ids are 0 .. {self.num_blocks - 1}, got {block_id}")
        data = as_bytes(self.data)
        num_at_once = max(1, COPIED_BYTES // (data[:, :, :1].numel() * data.element_size()))
        for part in to_device(np.array(pairs), data.device).split(num_at_once):
            source, destination = part.unbind(1)
            data[:, :, destination] = data[:, :, source]


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, what: str) -> Tensor:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidArgumentError(f"dtype must be a torch.dtype of floats, got {dtype!r}")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"device must be one of PyTorch's, such as 'cuda'; got {device!r}"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"PyTorch finds no NVIDIA GPU here, got device {str(device)!r}")
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise OutOfMemoryError(
            f"a KV cache of {what} does not fit {device}; lower num_blocks or memory_fraction ({error})"
        ) from error


def _scales(num_layers: int, num_kv_heads: int, data: Tensor) -> Tensor | None:
    if data.dtype != FLOAT8:
        return None
    # Rows begin at multiples of 16 bytes: for another alignment Triton would compile a second kernel.
    width = -(-num_kv_heads // 4) * 4
    return torch.ones(num_layers, 2, width, dtype=torch.float32, device=data.device)[..., :num_kv_heads]


def _layer_of(data: Tensor, layout: "CacheLayout", index: int) -> tuple[Tensor, ...]:
    """Return a layer's keys and values, [N, KH, B, D] each: as many blocks as its group's tables may name."""
    group, num_pages = layout.groups[layout.group_of(index)], data.shape[2]
    kind, first = group.kind, group.first_block(index, num_pages)
    num_blocks = group.block_id(num_pages - 1, group.blocks_per_page - 1, num_pages) + 1
    size = layout.block_size * kind.size
    part = slice(first * size, (first + num_blocks) * size)
    shape = (num_blocks, kind.num_kv_heads, layout.block_size, kind.head_dim)
    return tuple(plane.flatten()[part].view(shape) for plane in data)


def write_rows(cache: Tensor, index: Index, rows: Tensor, scale: Tensor | None) -> None:
    """Set cache[index] = rows.

    Args:
        cache: [N, B, KH, D]; written.
        index: block ids, or block ids and offsets within them.
        rows: [..., KH, D] in any float dtype.
        scale: [KH] float32 of a float8 cache; None: 1.
    """
    if cache.dtype != FLOAT8:
        cache[index] = rows.to(cache.dtype)
        return
    rows = rows.float() if scale is None else rows.float() / scale.unsqueeze(-1)
    # Some versions of torch convert numbers beyond the range to NaN, so rows are clamped first.
    rows = rows.clamp(-LARGEST, LARGEST).to(FLOAT8)
    as_bytes(cache)[index] = as_bytes(rows)


def read_rows(cache: Tensor, index: Index, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return cache[index] as a new [..., KH, D] of a dtype; arguments as for write_rows."""
    if cache.dtype != FLOAT8:
        return cache[index].to(dtype)
    rows = as_bytes(cache)[index].view(FLOAT8).to(dtype)
    return rows if scale is None else rows * scale.to(dtype).unsqueeze(-1)


def scale_of(scale: Tensor | None, sequences: Tensor | int) -> Tensor | None:
    """Return the scale of a sequence, [KH], or of several [X], [X, 1, KH] to scale [X, keys, KH, D].

    Args:
        scale: [KH] for all sequences, [S, KH] for each, or None.
        sequences: rows of the block table.
    """
    if scale is None or scale.dim() == 1:
        return scale
    return scale[sequences] if isinstance(sequences, int) else scale[sequences].unsqueeze(1)


def as_bytes(cache: Tensor) -> Tensor:
    """View a float8 tensor as bytes, because float8 lacks some indexing; return other tensors unchanged."""
    return cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
