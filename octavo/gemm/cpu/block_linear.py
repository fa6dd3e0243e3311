"""Linear layers on CPUs whose weight stays in blocks of 4 or 8 bits, as the checkpoint stores it.

The C kernel (gemm/cpu/c/blocks.c) multiplies the integers as they are, and the numbers of MXFP4 as integers
twice as large. Rows of x become 8-bit blocks as well,
each with a scale of its own, so no row's result depends on the rows it is batched with.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from octavo.forms.base import LayerWeight, QuantisedWeight
from octavo.forms.blocks import BLOCK, BlockWeight
from octavo.forms.mxfp4 import Mxfp4Weight
from octavo.forms.stored_blocks import StoredBlocks
from octavo.gemm.cpu.compiled_blocks import GROUP, CompiledLinear, Tiles, tile_blocks, tile_codes, tile_rows
from octavo.gemm.cpu.huge_pages import HugePages
from octavo.gemm.cpu.library import compile_failure
from octavo.gemm.linear import UnfusedLinear

AnyBlocks = BlockWeight | StoredBlocks
_Tileable = AnyBlocks | Mxfp4Weight


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why weights in blocks cannot be multiplied by x of a dtype on a device, or None if they can."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"it needs float32 on a CPU, got {dtype} on {device}"
    return compile_failure()


class TiledBlocks:
    """A weight in the order in which the kernel reads it: R rows side by side, see tile_rows.

        quants  [N / R, K / 32, 8 groups of 4 columns, R rows, 4]     8 bits
                [N / R, K / 32, 4, R, 4]                              4 bits: group g low, g + 4 high
        scales  [N / R, scales of a row, R rows]                      mins likewise; of MXFP4 exponents

    Attributes:
        num_rows: N, without the padding to whole tiles.
        num_columns: K.
        bits: of a number.
        order: [K] int64, the column of x that each column meets; None: the same.
        quants, scales, mins: see above.
        tiles: the same for the kernel.
    """

    def __init__(
        self, weight: _Tileable, pages: HugePages | None = None, *, num_rows: int | None = None
    ) -> None:
        """Copy a weight.

        Args:
            weight: [n, K].
            pages: memory for the copy; None: torch's.
            num_rows: N, more than the weight has, whose rows then are 0. Default: as many.
        """
        self.num_columns = weight.shape[1]
        self.num_rows = num_rows or weight.shape[0]
        self.bits = 4 if isinstance(weight, Mxfp4Weight) else weight.bits
        self.order: Tensor | None = None
        tile = tile_rows()
        num_tiles = -(-self.num_rows // tile)
        if isinstance(weight, StoredBlocks):
            tensors = tile_blocks(weight.stored, num_tiles, self.bits, weight.has_mins, pages)
            self.quants, self.scales, self.mins = tensors
        elif isinstance(weight, Mxfp4Weight):
            self.quants, self.scales = tile_codes(weight.values, weight.exponents, num_tiles, pages)
            self.mins = None
        else:
            self._copy(weight.in_blocks(), tile, num_tiles * tile - weight.shape[0])
            if pages is not None:
                self.quants, self.scales = pages.copy(self.quants), pages.copy(self.scales)
                self.mins = None if self.mins is None else pages.copy(self.mins)
        self.tiles = self._describe()

    def _copy(self, weight: BlockWeight, tile: int, padding: int) -> None:
        self.order = weight.order
        self.quants = _tiled_quants(_padded(weight.quants, padding), self.bits, tile)
        self.scales = _side_by_side(_padded(weight.scales, padding), tile)
        self.mins = None if weight.mins is None else _side_by_side(_padded(weight.mins, padding), tile)

    def _describe(self) -> Tiles:
        scales_of_a_block = self.scales.shape[1] * BLOCK // self.num_columns
        mins = None if self.mins is None else self.mins.data_ptr()
        return Tiles(
            self.quants.data_ptr(),
            self.scales.data_ptr(),
            mins,
            self.num_rows,
            self.bits,
            self.scales.itemsize,
            scales_of_a_block,
        )

    @property
    def kind(self) -> str:
        """See QuantisedWeight."""
        return "blocks"

    @property
    def device(self) -> torch.device:
        """See QuantisedWeight."""
        return self.quants.device

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.num_rows, self.num_columns

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what `rows` returns."""
        return torch.float32

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [T] of the weight, not of MXFP4, a new [T, K] float32."""
        assert self.scales.dtype != torch.uint8, "rows of MXFP4 cannot be looked up"
        rows_beside = self.scales.shape[2]
        tile, place = ids.long() // rows_beside, ids.long() % rows_beside
        # [T, K / 32, groups, 4]
        quants = self.quants[tile, :, :, place]
        if self.bits == 4:
            quants = torch.cat((quants & 15, quants >> 4), dim=2)
        scales = self.scales[tile, :, place].float()
        values = quants.reshape(*scales.shape, -1) * scales[..., None]
        if self.mins is not None:
            values += self.mins[tile, :, place].float()[..., None]
        values = values.view(len(ids), self.num_columns)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)


class BlockLinear(UnfusedLinear):
    """y = x W^T + b with weights in blocks that lie above one another; float32 in and out.

    Attributes:
        weights: [N_i, K] each.
    """

    def __init__(self, parts: Sequence[TiledBlocks], bias: Tensor | None = None) -> None:
        """Keep weights and bias [sum of N_i] float32."""
        self.weights = parts
        self._products: list[tuple[Tensor | None, CompiledLinear]] = []
        row = 0
        # Weights that meet the columns of x in one order are one product.
        for _, group in groupby(parts, _order_bytes):
            parts = list(group)
            num_rows = sum(part.num_rows for part in parts)
            part_bias = None if bias is None else bias[row : row + num_rows]
            product = CompiledLinear([part.tiles for part in parts], part_bias)
            self._products.append((parts[0].order, product))
            row += num_rows
        self._num_rows = row

    @property
    def compiled(self) -> CompiledLinear | None:
        """The layer as C knows it, or None: it is several products, or reorders x."""
        order, product = self._products[0]
        return product if len(self._products) == 1 and order is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self._num_rows, dtype=torch.float32)
        column = 0
        for order, product in self._products:
            product(x if order is None else x.index_select(1, order), out, column)
            column += product.num_outputs
        return out


def make_layer(weights: Iterable[_Tileable | TiledBlocks], bias: Tensor | None) -> BlockLinear:
    """Return the layer of weights that lie above one another, [N_i, K] each, and bias [sum of N_i]."""
    return BlockLinear(tiled(weights), bias)


def tiled(weights: Iterable[_Tileable | TiledBlocks]) -> list[TiledBlocks]:
    """Tile those weights that are not tiled yet, each into memory of its own."""
    return [weight if isinstance(weight, TiledBlocks) else TiledBlocks(weight) for weight in weights]


def tiled_on_cpu(weight: QuantisedWeight, pages: HugePages, dtype: torch.dtype) -> LayerWeight:
    """Tile a weight into some memory if the kernel multiplies it by x of a dtype; others stay as they are."""
    if isinstance(weight, _Tileable) and unsupported_reason(weight.device, dtype) is None:
        return TiledBlocks(weight, pages)
    return weight


def _order_bytes(part: TiledBlocks) -> bytes | None:
    return None if part.order is None else part.order.numpy().tobytes()


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros(num_rows, tensor.shape[1]))) if num_rows else tensor


def _tiled_quants(quants: Tensor, bits: int, tile: int) -> Tensor:
    """[N, K] to the order of TiledBlocks.quants."""
    columns = quants.shape[1]
    if bits == 4:
        low, high = quants.view(len(quants), -1, 2, BLOCK // 2).unbind(2)
        quants = (high << 4).bitwise_or_(low)
    # The 4 bytes of a group stay together: they are moved as one number.
    groups = (
        quants.contiguous().view(torch.int32).view(-1, tile, columns // BLOCK, bits * BLOCK // 8 // GROUP)
    )
    return groups.permute(0, 2, 3, 1).contiguous().view(quants.dtype).unflatten(-1, (tile, GROUP))


def _side_by_side(scales: Tensor, tile: int) -> Tensor:
    """[N, n] to [N / R, n, R]."""
    return scales.view(-1, tile, scales.shape[1]).transpose(1, 2).contiguous()
