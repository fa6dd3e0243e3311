"""Moving decoding sequences on by one token inside a CUDA graph; imported only where Triton runs."""

# Triton's hints do not know plain values for constexpr.
# pyright: reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidArgumentError

_BLOCK = 128


def advance_decode_step(
    sampled_ids: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    block_size: int,
) -> None:
    """Turn a decode step's inputs into the next step's, in place, on the device.

        before   | t0 t1 t2 |          seq_len 3, position 2 was fed, `s` was sampled
        after    | t0 t1 t2 s |        seq_len 4, position 3, input s, its slot from the block table

    Rows with seq_len 0 are dead: they stay dead, store nothing (slot -1) and keep their other fields. So
    does a live row whose next position lies beyond its block table, as far as its slot goes.

    Args:
        sampled_ids: [R] int32 or int64, token of each row.
        input_ids: [at least R] int32 or int64; written.
        positions: [at least R] int32; mutated.
        seq_lens: [at least R] int32; mutated.
        slot_mapping: [at least R] int32 or int64; written.
        block_table: [at least R, max_blocks] int32, any row stride; must hold the next position's block.
        block_size: B, tokens.

    Raises:
        InvalidArgumentError: an array is shorter than R or not contiguous.
    """
    num_rows = sampled_ids.shape[0]
    arrays = {"sampled_ids": sampled_ids, "input_ids": input_ids, "positions": positions}
    arrays |= {"seq_lens": seq_lens, "slot_mapping": slot_mapping, "block_table": block_table}
    for name, array in arrays.items():
        if array.shape[0] < num_rows or array.stride(-1) != 1:
            raise InvalidArgumentError(
                f"{name} must hold at least {num_rows} rows, its last dimension contiguous; "
                f"got shape {list(array.shape)}, strides {list(array.stride())}"
            )
    if num_rows:
        _advance_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            sampled_ids,
            input_ids,
            positions,
            seq_lens,
            slot_mapping,
            block_table,
            num_rows,
            block_table.shape[1],
            block_table.stride(0),
            block_size,
            BLOCK=_BLOCK,
        )


@triton.jit
def _advance_kernel(
    sampled_ids_ptr,
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    block_table_ptr,
    num_rows,
    max_blocks,
    stride_table,
    block_size,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(R / BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    seq_len = tl.load(seq_lens_ptr + row, mask=inside, other=0)
    is_live = seq_len > 0
    position = tl.load(positions_ptr + row, mask=is_live, other=0) + 1
    tl.store(input_ids_ptr + row, tl.load(sampled_ids_ptr + row, mask=is_live, other=0), mask=is_live)
    tl.store(positions_ptr + row, position, mask=is_live)
    tl.store(seq_lens_ptr + row, seq_len + 1, mask=is_live)
    column = position // block_size
    has_block = is_live & (column < max_blocks)
    block = tl.load(block_table_ptr + row * stride_table + column, mask=has_block, other=0).to(tl.int64)
    slot = tl.where(has_block, block * block_size + position % block_size, -1)
    tl.store(slot_mapping_ptr + row, slot, mask=inside)
