"""The Gluon kernels compile for a Hopper GPU, and those that share a multiprocessor fit it."""

import importlib.util
from pathlib import Path

import pytest
from compiled_figures import compiled_figures

from octavo.attention.tilings.hopper import (
    BESIDE_SHAPE,
    DECODE_SHAPE,
    FEW_LEAVES_SHAPE,
    LEAF_SHAPE,
    NODE_SHAPE,
    PROMPT_SHAPE,
    SHORT_SHAPE,
    WIDE_DECODE_SHAPE,
    WIDE_SHAPE,
    WIDEST_DECODE_SHAPE,
    WIDEST_SHAPE,
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# Of a multiprocessor: bytes of shared memory, 1024 of which each program takes besides; and of each of its
# quarters: registers, dealt to a warp of 32 lanes by 256.
SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 1024
QUARTER_REGISTERS, DEALT_REGISTERS = 65536 // 4, 256


@pytest.fixture(scope="module")
def compiled():
    """{"hopper" or "portable": {kernel: {registers, stack, shared}}}."""
    return compiled_figures(Path(__file__).with_name("compile_portable.py"))


@pytest.fixture
def figures(compiled):
    """Of the Gluon kernels."""
    return compiled["hopper"]


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("decode", DECODE_SHAPE),
        ("leaves", LEAF_SHAPE),
        ("few leaves", FEW_LEAVES_SHAPE),
        ("nodes beside", BESIDE_SHAPE),
        ("nodes", NODE_SHAPE),
        ("prompts", PROMPT_SHAPE),
        ("short prompts", SHORT_SHAPE),
        ("prompts beside nodes", NODE_SHAPE),
        ("prompts, short blocks", PROMPT_SHAPE),
        ("nodes, short blocks", NODE_SHAPE),
        ("nodes beside, short blocks", BESIDE_SHAPE),
        ("decode, short blocks", DECODE_SHAPE),
        ("decode from a first key", DECODE_SHAPE),
        ("prompts from a first key", PROMPT_SHAPE),
        ("decode, window", DECODE_SHAPE),
        ("leaves, window", LEAF_SHAPE),
        ("few leaves, window", FEW_LEAVES_SHAPE),
        ("nodes, window", NODE_SHAPE),
        ("nodes beside, window", BESIDE_SHAPE),
        ("prompts, window", PROMPT_SHAPE),
        ("decode, wide", WIDE_DECODE_SHAPE),
        ("decode, wide, short blocks", WIDE_DECODE_SHAPE),
        ("decode, widest", WIDEST_DECODE_SHAPE),
        ("prompts, wide", WIDE_SHAPE),
        ("prompts, wide, window", WIDE_SHAPE),
        ("nodes, wide, short blocks", WIDE_SHAPE),
        ("prompts, widest", WIDEST_SHAPE),
        ("nodes, widest, short blocks", WIDEST_SHAPE),
    ],
)
def test_a_kernel_keeps_its_registers_and_as_many_programs_fit_as_are_meant_to(figures, kernel, tile):
    used = figures[kernel]
    # Some numbers of an item, or of a program's run, wait there while tiles are attended.
    most = {WIDE_SHAPE: 8, WIDEST_SHAPE: 24, WIDEST_DECODE_SHAPE: 192}.get(tile, 0)
    assert used["stack"] <= most, "registers are spilled to memory"
    assert used["registers"] <= tile.max_registers
    programs = tile.programs_per_multiprocessor
    assert programs * (used["shared"] + RESERVED_BYTES) <= SHARED_BYTES
    if programs > 1:
        # One warp each, dealt to the quarters in turn; or a warpgroup, and the warp that fetches, rounded up.
        warps = -(-programs // 4) if tile.num_warps == 1 else 2 * programs
        assert warps * warp_registers(used) <= QUARTER_REGISTERS


@pytest.mark.parametrize("kind", ["", ", window"])
@pytest.mark.parametrize(("leaves", "tile"), [("leaves", LEAF_SHAPE), ("few leaves", FEW_LEAVES_SHAPE)])
def test_leaves_find_room_beside_one_program_of_nodes(figures, leaves, tile, kind):
    """And a second program of nodes does not, since it would keep them out."""
    nodes, leaf = figures[f"nodes beside{kind}"], figures[f"{leaves}{kind}"]
    programs = tile.programs_per_multiprocessor
    # A warpgroup, and the warp that fetches, rounded up to one: two warps in each quarter.
    node_registers = 2 * warp_registers(nodes)
    assert node_registers + programs // 4 * warp_registers(leaf) <= QUARTER_REGISTERS
    assert 2 * node_registers > QUARTER_REGISTERS
    shared = nodes["shared"] + programs * leaf["shared"] + (1 + programs) * RESERVED_BYTES
    assert shared <= SHARED_BYTES


def warp_registers(used):
    return -(-used["registers"] * 32 // DEALT_REGISTERS) * DEALT_REGISTERS


def test_portable_variants_compile(compiled):
    """Triton's interpreter, by which they are tested, knows no types; spilled registers would be slow."""
    assert len(compiled["portable"]) == 38
    for name, used in compiled["portable"].items():
        # Three loops of 128 rows a program, two programs an SM: what they keep between loops may spill.
        # Keys of one number beside values of 256: no model has them.
        most = 256 if name.startswith("prefill") else 16 if "wide values" in name else 0
        if name == "nodes, window, 256":
            # Its tile fills all registers; without a window 32 bytes spill, too.
            most = 64
        assert used["stack"] <= most, name
