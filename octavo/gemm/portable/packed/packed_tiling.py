"""How GEMMs with packed weights are tiled. Importing this imports no Triton."""

from dataclasses import dataclass
from functools import cache

from octavo.forms.packed import PLANE

# Rows of two tensor core tiles.
FEW_MAX_ROWS = 16
_TILE_ROWS = 8
_SHORT = 4096
# Words, scales and minimums of a stage with 64 rows of the weight, at most.
_WORD_BYTES = 16 * 1024
_NARROW = 8192
# Columns of groups whose scales and sums leave registers for wide tiles.
_COARSE = 128


@dataclass(frozen=True, slots=True)
class FewTiling:
    """How few_linear is tiled; powers of two, but for stages and parts.

    Attributes:
        columns: rows of the weight of a tile, 16 or 32.
        num_warps: that share K.
        num_stages: spans of a warp in shared memory, 2 or more.
        programs: per multiprocessor.
        num_splits: parts of K, each multiplied by programs of its own; another launch adds them up. 1 for a
            single row.
        in_registers: whether a warp keeps its columns of a single row in registers; those of more rows it
            always does.
    """

    columns: int
    num_warps: int
    num_stages: int
    programs: int
    num_splits: int = 1
    in_registers: bool = False


@cache
def few_tiling_for(num_rows: int, size: int, group: int, generation: int) -> FewTiling:
    """Return the tiling for M rows and a weight [N, K]: by measurement on an H200.

    Args:
        num_rows: M.
        size: K.
        group: columns of a group; scales and sums of small ones leave few registers for x.
        generation: of the GPU, 9 for Hopper.
    """
    is_narrow = group < PLANE
    if num_rows == 1:
        if size > _SHORT or is_narrow:
            return FewTiling(16, 8, 3, 2)
        return FewTiling(16, 4, 6, 2, in_registers=True)
    # Columns of x that 8 warps can keep.
    kept = _SHORT // 2 if is_narrow else _SHORT
    if num_rows <= _TILE_ROWS:
        num_splits = -(-size // kept)
        return FewTiling(16, 4, 6, 2, num_splits) if group > PLANE else FewTiling(16, 8, 4, 1, num_splits)
    num_splits = -(-size // (kept // 2))
    if group < _COARSE:
        return FewTiling(16, 8, 4, 1, num_splits)
    # Other GPUs have less memory in an SM.
    return FewTiling(32, 8, 3 if generation >= 9 else 2, 1, num_splits)


@dataclass(frozen=True, slots=True)
class MediumTiling:
    """Tile of one program of medium_linear; powers of two.

    Attributes:
        rows: of x, 16 or more.
        columns: rows of the weight, 16 or more.
        num_warps: warps per program.
        num_stages: spans that are fetched ahead, and the one that is multiplied.
        num_splits: parts of K, each multiplied by programs of its own; another launch adds them up.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


@cache
def medium_tiling_for(num_rows: int, num_weight_rows: int, most_shared: int) -> MediumTiling:
    """Return the tiling for M rows and a weight of N rows, gate and up counted: by measurement on an H200.

    most_shared: see kernels.device.shared_bytes.
    """
    rows = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    if num_weight_rows <= _NARROW:
        # A stage that is fetched ahead has up to 256 columns of x, and words of the weight.
        fits = 2 * (512 * rows + _WORD_BYTES) <= most_shared
        return MediumTiling(rows, 64, 4, 3, 2) if fits else MediumTiling(rows, 64, 8, 2, 2)
    return MediumTiling(rows, 64, 4, 2) if rows <= 64 else MediumTiling(rows, 128, 8, 2, 2)
