"""What tiles of gate and up in one operand share; imported only where Triton runs."""

import triton
import triton.language as tl


@triton.jit
def tile_weight_rows(index, num_columns, COLUMNS: tl.constexpr, HALVES: tl.constexpr):
    """Return the rows of a weight that a program has: of gate, then of up; or plain ones.

    Those past the end repeat the last one and are not stored.
    """
    OWN: tl.constexpr = COLUMNS // HALVES
    column = tl.program_id(0) * OWN + index % OWN
    return tl.minimum(column, num_columns - 1) + index // OWN * num_columns


@triton.jit
def gate_of(total, HALVES: tl.constexpr):
    """Split sums [COLUMNS, ROWS] into those of gate and of up; without an activation return them twice."""
    if HALVES == 1:
        return total, total
    else:
        halves = tl.reshape(total, [2, total.shape[0] // 2, total.shape[1]])
        return tl.split(tl.permute(halves, (1, 2, 0)))
