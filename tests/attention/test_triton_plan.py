"""The device-side task map: every key tile in exactly one program's run, work cut evenly."""

from collections import Counter

import pytest
import torch
from triton_cases import DEVICE, make_case, poisoned_memory, tl, to_device, triton

from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings import hopper as hopper_shapes
from octavo.attention.tilings import portable as portable_shapes
from octavo.attention.tilings import step_tiles
from octavo.attention.tilings.hopper import (
    DECODE_SHAPE,
    FEW_LEAVES_SHAPE,
    LEAF_SHAPE,
    NODE_SHAPE,
    PROMPT_SHAPE,
    SHORT_SHAPE,
    WIDE_DECODE_SHAPE,
    WIDE_SHAPES,
    WIDEST_DECODE_SHAPE,
)
from octavo.attention.tilings.portable import (
    TileShape,
    decode_shape,
    fused_shape,
    node_shape,
    prefill_shape,
)
from octavo.attention.tilings.step_tiles import decode_tile, prompt_tile
from octavo.attention.triton.paged_decode import partial_id
from octavo.attention.triton.step_map import make_step_map
from octavo.attention.triton.uniform_map import make_uniform_map


def step_map(seq_lens, query_lens, **options):
    moved = to_device(make_case(seq_lens, query_lens))
    with poisoned_memory():
        return make_step_map(
            moved.metadata,
            num_tokens=moved.q.shape[0],
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            dtype=torch.float32,
            **options,
        )


def live(units):
    return [unit for unit in units.tolist() if unit[2] > 0]


def test_programs_get_equal_runs_that_cover_all_tiles():
    shape = TileShape(rows=16, keys=16, num_warps=4, num_stages=2, programs_per_multiprocessor=3)
    thin = step_map([100, 0, 17, 16, 300], [1, 1, 0, 2, 1], decode=shape).decode
    # Tiles of 16 keys, twice for two kv heads; an empty sequence is no work.
    tiles = [7, 0, 1, 19]
    assert [unit[0] for unit in live(thin.units)] == [0, 1, 3, 4]
    ends = [2 * sum(tiles[: i + 1]) for i in range(4)]
    assert [unit[7] for unit in live(thin.units)] == ends
    per_program, total, *starts = thin.schedule.tolist()
    assert total == ends[-1] == 54
    assert per_program == -(-total // len(starts))
    for program, unit in enumerate(starts):
        first_tile = program * per_program
        if first_tile < total:
            assert ([0, *ends][unit]) <= first_tile < ends[unit]


@pytest.mark.parametrize("window", [None, 30])
def test_units_cover_each_token_once_with_the_keys_it_sees(window):
    seq_lens, query_lens = [200, 90, 0, 150, 64], [130, 1, 70, 150, 9]
    made = step_map(seq_lens, query_lens, window=window)
    begins = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    tokens = Counter()
    for row, token, count, kv_begin, kv_end, full_begin, full_end, _ in live(made.decode.units) + live(
        made.prefill.units
    ):
        tokens.update(range(token, token + count))
        assert begins[row] <= token < token + count <= begins[row + 1]
        first = seq_lens[row] - query_lens[row] + token - begins[row]
        if seq_lens[row] == 0:
            assert kv_begin == kv_end == 0
            continue
        last = first + count - 1
        assert (kv_end, full_end) == (last + 1, first + 1)
        if window:
            assert (kv_begin, full_begin) == (max(0, first - window + 1), max(0, last - window + 1))
        else:
            assert kv_begin == full_begin == 0
    assert tokens == Counter(range(sum(query_lens)))


def test_classes_split_by_query_length():
    """8 tokens of 2 heads fill 16 rows: longer queries are fat."""
    made = step_map([100, 100, 100], [8, 9, 1])
    assert [unit[0] for unit in live(made.decode.units)] == [0, 2]
    assert {unit[0] for unit in live(made.prefill.units)} == {1}
    assert step_map([100, 100], [8, 1]).prefill is None


def test_few_fat_units_share_their_keys_among_programs():
    assert step_map([1500], [9], prefill=TileShape(64, 16, 4, 2, 4)).prefill.num_parts == 2
    assert step_map([400], [9], prefill=TileShape(64, 16, 4, 2, 4)).prefill.num_parts == 1


HOPPER_BYTES, RTX_BYTES = 227 * 1024, 99 * 1024


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch):
    """A GPU that is not there has as much as a Hopper GPU; set_shared changes it."""

    def set_shared(num_bytes):
        monkeypatch.setattr(portable_shapes, "shared_bytes", lambda device: num_bytes)
        for tiling in (decode_shape, prefill_shape, node_shape):
            monkeypatch.setattr(portable_shapes, tiling.__name__, tiling.__wrapped__)

    set_shared(HOPPER_BYTES)
    return set_shared


@pytest.mark.parametrize("most", [HOPPER_BYTES, RTX_BYTES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("padded_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 4, 8, 16, 32])
def test_programs_fit_the_shared_memory_of_any_gpu(shared_memory, most, dtype, padded_dim, group):
    """Queries and all stages but one of keys and values; the compiler is asked in test_wide_heads.py."""
    shared_memory(most)
    device, product = torch.device("cuda"), torch.float16 if dtype.itemsize == 1 else dtype
    tilings = (
        (portable_shapes.decode_shape(group, padded_dim, dtype, device=device), dtype),
        (portable_shapes.decode_shape(group, padded_dim, dtype, is_alone=True, device=device), dtype),
        (fused_shape(group, padded_dim, dtype, device), dtype),
        (portable_shapes.prefill_shape(group, padded_dim, product, device), product),
        (portable_shapes.node_shape(group, padded_dim, product, device), product),
    )
    for tile, kept in tilings:
        buffers = 2 * (tile.num_stages - 1) * tile.keys * padded_dim * kept.itemsize
        assert buffers + 2 * tile.rows * padded_dim <= most
        assert tile.programs_per_multiprocessor >= 1
        assert tile.rows >= group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 5, 71, 200])
def test_shapes_are_powers_of_two_and_fit_shared_memory(dtype, padded_dim, group):
    for shape in (decode_shape(group, padded_dim, dtype), prefill_shape(group, padded_dim, dtype)):
        assert shape.rows >= max(16, group)
        assert shape.keys >= 16
        assert shape.rows & (shape.rows - 1) == shape.keys & (shape.keys - 1) == 0
        keys_and_values = 2 * shape.num_stages * shape.keys * padded_dim * dtype.itemsize
        assert shape.programs_per_multiprocessor * keys_and_values <= 200 * 1024


HOPPER_CASE = {
    "group": 4,
    "head_dim": 128,
    "dtype": torch.bfloat16,
    "block_size": 64,
    "num_sequences": 40,
    "shares": False,
}


def chosen_shape(monkeypatch, generation, **changes):
    """The decode shape on a GPU of a generation, whatever this machine has; nothing is remembered."""
    monkeypatch.setattr(hopper_shapes, "nvidia_generation", lambda device: generation)
    monkeypatch.setattr(hopper_shapes, "unsupported_reason", hopper_shapes.unsupported_reason.__wrapped__)
    return decode_tile(torch.device("cuda"), **HOPPER_CASE | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, DECODE_SHAPE),
        ({"dtype": torch.float16, "block_size": 320, "group": 16}, DECODE_SHAPE),
        ({"block_size": 16}, DECODE_SHAPE),
        ({"block_size": 96}, DECODE_SHAPE),
        ({"num_sequences": 2, "shares": True}, FEW_LEAVES_SHAPE),
        ({"num_sequences": 127, "shares": True}, FEW_LEAVES_SHAPE),
        ({"num_sequences": 128, "shares": True}, LEAF_SHAPE),
        ({"num_sequences": 512}, DECODE_SHAPE),
        ({"head_dim": 256}, WIDE_DECODE_SHAPE),
        ({"head_dim": 256, "num_sequences": 200, "shares": True}, WIDE_DECODE_SHAPE),
        ({"head_dim": 512, "group": 8}, WIDEST_DECODE_SHAPE),
    ],
)
def test_hopper_gpus_decode_by_their_own_tiles(monkeypatch, changes, expected):
    assert chosen_shape(monkeypatch, 9, **changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"num_sequences": 1},
        {"dtype": torch.float32},
        {"dtype": torch.float8_e4m3fn},
        {"head_dim": 64},
        {"head_dim": 80},
        {"head_dim": 512, "group": 9},
        {"block_size": 1},
        {"block_size": 8},
        {"block_size": 40},
        {"group": 17},
    ],
)
@pytest.mark.parametrize("shares", [False, True])
def test_what_the_copy_engine_cannot_take_is_decoded_by_portable_tiles(monkeypatch, changes, shares):
    case = HOPPER_CASE | {"num_sequences": 200, "shares": shares} | changes
    padded_dim = {80: 128}.get(case["head_dim"], case["head_dim"])
    portable = decode_shape(case["group"], padded_dim, case["dtype"], is_alone=case["num_sequences"] == 1)
    assert chosen_shape(monkeypatch, 9, **case) == portable
    assert portable not in (*hopper_shapes.DECODE_SHAPES.values(), FEW_LEAVES_SHAPE, LEAF_SHAPE)


@pytest.mark.parametrize("generation", [0, 8, 10])
def test_other_gpus_decode_by_portable_tiles(monkeypatch, generation):
    assert chosen_shape(monkeypatch, generation) == decode_shape(4, 128, torch.bfloat16)


@pytest.mark.parametrize(
    ("num_tokens", "leaves_begin_at", "expected"),
    [
        (64 + 256, 0, SHORT_SHAPE),
        (64 + 256, 64, SHORT_SHAPE),
        (64 + 1024, 0, NODE_SHAPE),
        (8192, 0, PROMPT_SHAPE),
        (8192, 128, PROMPT_SHAPE),
        (8192, 64, NODE_SHAPE),
    ],
)
def test_only_much_work_takes_prompts_in_large_tiles(monkeypatch, num_tokens, leaves_begin_at, expected):
    """Of 16 heads, on a GPU of 132 SMs."""
    monkeypatch.setattr(hopper_shapes, "nvidia_generation", lambda device: 9)
    monkeypatch.setattr(hopper_shapes, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper_shapes, "unsupported_reason", hopper_shapes.unsupported_reason.__wrapped__)
    portable = prefill_shape(2, 128, torch.bfloat16)
    rows = {"num_rows": num_tokens * 16, "portable": portable}
    units = prompt_tile(torch.device("cuda"), 2, 128, torch.bfloat16, 64, **rows)
    device = torch.device("cuda")
    assert hopper_shapes.attended_tile(device, units, num_tokens * 16, leaves_begin_at) == expected
    assert (units == portable) == (expected != SHORT_SHAPE)
    for head_dim, shape in WIDE_SHAPES.items():
        wide = prompt_tile(device, 2, head_dim, torch.bfloat16, 64, **rows)
        assert hopper_shapes.attended_tile(device, wide, num_tokens * 16, leaves_begin_at) == shape == wide
    assert prompt_tile(torch.device("cuda"), 2, 128, torch.float32, 64, **rows) == portable
    assert prompt_tile(torch.device("cuda"), 128, 128, torch.bfloat16, 64, **rows) == portable


@pytest.mark.parametrize(("query_len", "num_parts"), [(100, 4), (300, 1)])
def test_units_are_small_only_where_they_are_left_whole(monkeypatch, query_len, num_parts):
    """By either planner; parts of a few units' keys are for the portable kernel, in its own tiling."""
    monkeypatch.setattr(hopper_shapes, "nvidia_generation", lambda device: 9)
    monkeypatch.setattr(hopper_shapes, "unsupported_reason", hopper_shapes.unsupported_reason.__wrapped__)
    for module in (step_tiles, hopper_shapes):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    case = to_device(make_case([5000], [query_len], heads=16, kv_heads=8, head_dim=128, block_size=64))
    metadata = case.metadata
    sizes = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "block_size": 64}
    ragged = make_step_map(metadata, num_tokens=query_len, **sizes).prefill
    uniform, _ = make_uniform_map(
        metadata.seq_lens, None, query_len=query_len, max_seq_len=5000, value_dim=128,
        cache_dtype=torch.bfloat16, options=ScoreOptions(1.0), **sizes,
    )  # fmt: skip
    for work in (ragged, uniform.prefill):
        assert work.num_parts == num_parts
        assert work.shape == (SHORT_SHAPE if num_parts == 1 else prefill_shape(2, 128, torch.bfloat16))
        counts = [unit[2] for unit in live(work.units)]
        assert sum(counts) == query_len
        assert max(counts) == work.shape.rows // 2


@triton.jit
def _partial_ids_kernel(ids, starts, tiles_per_program):
    i = tl.program_id(0)
    tl.store(ids + i, partial_id(tl.load(starts + i), tiles_per_program))


def test_pieces_that_may_wait_for_a_merge_at_once_have_their_own_partials():
    """A run's first piece may still wait for its neighbours when the run's last piece is written."""
    starts = torch.tensor([0, 3, 5, 9, 10, 19], dtype=torch.int32, device=DEVICE)
    ids = torch.full_like(starts, -1)
    _partial_ids_kernel[(6,)](ids, starts, 5)
    assert ids.tolist() == [0, 1, 2, 3, 4, 7]
