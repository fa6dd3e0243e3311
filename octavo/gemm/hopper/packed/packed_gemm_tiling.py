"""Where the GEMM with packed weights for Hopper GPUs runs, and how it is tiled. Imports no Triton."""

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import PLANE, TILE, PackedWeight
from octavo.kernels.device import nvidia_generation

# Columns of K that lie side by side in shared memory, 128 bytes of x.
ATOM = 64
# Atoms of a span, columns of a span.
ATOMS = 4
SPAN = ATOMS * ATOM
MOST_ROWS = 256
# For up to so many rows of x: rows of a block, and blocks that a program multiplies by, which hold all rows
# or half of them. For weights of many spans, and for others, where small parts are added up sooner.
_MANY_FORMS = {32: (32, 1), 64: (64, 1), 96: (32, 3), 128: (128, 1), 192: (64, 3), MOST_ROWS: (128, 1)}
_FORMS = _MANY_FORMS | {128: (64, 1), 192: (32, 3), MOST_ROWS: (64, 2)}
# Spans of an SM from which on they are many.
_MANY_UNITS = 16
# Shared memory for rows and words: all of an SM's, less that of barriers.
_SHARED_BYTES = 226 * 1024


@dataclass(frozen=True, slots=True)
class HopperMediumTiling:
    """How hopper_medium_linear is tiled.

    Attributes:
        rows: of x that meet a tile of the weight at a time: 32, 64 or 128.
        blocks: of so many rows of x; all meet the same operand.
        atoms: of 64 columns of x in a buffer: 4, or 2 where rows are many.
        row_stages: such buffers, for whole spans.
        word_stages: buffers for 256 columns of the weight: as many spans as rows have or more, and 2 or more;
            the last columns of a span make room only when the next span is multiplied.
        programs: at most so many.
        per_sm: programs that have room on an SM at the same time, 1 or 2.

    Raises:
        InvalidArgumentError: buffers are too few, or hold parts of spans; there are no programs.
    """

    rows: int
    blocks: int
    atoms: int
    row_stages: int
    word_stages: int
    programs: int
    per_sm: int = 1

    def __post_init__(self) -> None:
        spans, rest = divmod(self.row_stages * self.atoms, ATOMS)
        if self.atoms not in (ATOMS // 2, ATOMS) or self.programs < 1:
            raise InvalidArgumentError(f"a tiling needs 2 or 4 atoms and programs, got {self}")
        if rest or self.row_stages < 2 or self.word_stages < max(2, spans):
            raise InvalidArgumentError(
                "a tiling needs 2 row_stages or more, for whole spans, and 2 word_stages or more, for as "
                f"many spans; got {self}"
            )

    @property
    def max_registers(self) -> int:
        """Registers of a thread, were all threads to have as many; the TMA warp counts as a warpgroup."""
        return 168 if self.per_sm == 1 else 80


def unsupported_reason(x: Tensor, weight: PackedWeight, *, is_gated: bool) -> str | None:
    """Return why Hopper's kernel cannot multiply x [M, K] and a packed weight, or None if it can."""
    if nvidia_generation(weight.words.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.words.device}"
    return misfit(x, weight, is_gated=is_gated)


def misfit(x: Tensor, weight: PackedWeight, *, is_gated: bool) -> str | None:
    """Return why a Hopper GPU's kernel cannot multiply x [M, K] by a weight; called per layer and step."""
    if x.shape[0] > MOST_ROWS:
        return f"it needs at most {MOST_ROWS} rows, got {x.shape[0]}"
    if weight.bits != 4:
        return f"it needs a weight of 4 bits, got {weight.bits}"
    if is_gated and weight.shape[0] % 16:
        return f"gate and up must have a multiple of 8 rows each, got {weight.shape[0]} together"
    if weight.shape[0] % 4:
        return f"it needs a multiple of 4 rows of the weight, got {weight.shape[0]}"
    if x.stride(0) % 8 or x.shape[1] % 8 or x.data_ptr() % 16:
        return (
            "x [M, K] must have K a multiple of 8, an address and rows of a multiple of 16 bytes, got "
            f"{list(x.shape)} with strides {list(x.stride())}"
        )
    return None


def make_tiling(
    rows: int, blocks: int, programs: int, per_sm: int = 1, group: int = 128
) -> HopperMediumTiling:
    """Return a tiling with as many buffers as fit into shared memory.

    Args:
        rows, blocks, programs, per_sm: as in HopperMediumTiling.
        group: columns of a group of the weight.
    """
    space = _SHARED_BYTES // per_sm
    atoms = ATOMS if rows * blocks <= 64 else ATOMS // 2
    parts = ATOMS // atoms
    stage = 2 * ATOM * atoms * rows * blocks
    words = 4 * TILE * (PLANE + SPAN // group)
    spans = next(
        n for n in (4, 3, 2, 1) if n * per_sm <= 4 and n * parts * stage + max(2, n) * words <= space
    )
    word_stages = min(8, (space - spans * parts * stage) // words)
    return HopperMediumTiling(rows, blocks, atoms, spans * parts, word_stages, programs, per_sm)


@cache
def hopper_medium_tiling_for(
    num_rows: int, num_weight_rows: int, size: int, group: int, num_multiprocessors: int
) -> HopperMediumTiling:
    """Return the tiling for M rows and a weight [N, K], gate and up counted: by measurement on H100 and H200.

    Up to 32 rows leave room for a second program on an SM. If one of the next kernel took it, it would fetch
    its words early; but then some SMs get two of a kernel and others none, and that costs more. So either two
    programs fill an SM, or one.

    Args:
        num_rows: M, at most MOST_ROWS.
        num_weight_rows: N.
        size: K.
        group: columns of a group.
        num_multiprocessors: of the GPU.
    """
    units = -(-num_weight_rows // TILE) * -(-size // SPAN)
    is_large = units >= _MANY_UNITS * num_multiprocessors
    forms = _MANY_FORMS if is_large else _FORMS
    rows, blocks = next(form for most, form in forms.items() if num_rows <= most)
    per_sm = 2 if rows * blocks == 32 and is_large else 1
    return make_tiling(rows, blocks, per_sm * num_multiprocessors, per_sm, group)
