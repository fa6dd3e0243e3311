"""Decoding on a real GPU, on Hopper by its own kernel: cuts, paddings, layouts, and leaves of a forest."""

from dataclasses import replace

import pytest
import torch
from overlaps import check_overlap
from test_triton_forest_gpu import make_forest, shared_case, upload
from test_triton_gpu import plain_torch
from triton_cases import HAS_GPU, make_case, poisoned_memory, tl, to_device, triton

from octavo.attention import KVCache, gpu_paged
from octavo.attention.hopper import tma_decode as hopper_decode
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings import hopper as hopper_shapes
from octavo.attention.tilings.hopper import FEW_LEAVES_SHAPE, LEAF_SHAPE
from octavo.attention.triton.kernel_call import make_call
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.layers.layer_options import LayerOptions
from octavo.layers.steps.gpu_step import TritonStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]

LONG = [5000, 4983]
SHORT = [1 + 37 * i % 200 for i in range(300)]
PADDED = [70, 0, 0, 900, 0, 64, 1, 0]


def decode_case(
    seq_lens, query_lens=None, *, group=4, kv_heads=2, head_dim=128, block_size=64, dtype=torch.bfloat16
):
    sizes = {"heads": group * kv_heads, "kv_heads": kv_heads, "block_size": block_size, "dtype": dtype}
    return make_case(seq_lens, query_lens or [1] * len(seq_lens), head_dim=head_dim, **sizes)


def attend_twice(case, window):
    """Results of two layers by one map, whose cut pieces are then all counted back; and the map."""
    moved = to_device(case)
    # As a part of a fused projection is.
    *sizes, dim = case.q.shape
    fused = torch.full((*sizes, 3 * dim), torch.nan, dtype=case.q.dtype, device=moved.q.device)
    q = fused[..., dim : 2 * dim].copy_(moved.q)
    layer = (q, moved.cache, moved.metadata, ScoreOptions(dim**-0.5, window))
    with poisoned_memory():
        step_map = gpu_paged.make_step_map(q, moved.cache, moved.metadata, window)
        results = [gpu_paged.attend_with_map(*layer, step_map) for _ in range(2)]
    assert not step_map.decode.arrivals.any()
    tensors = (q, moved.cache, moved.metadata.positions, moved.metadata.block_table)
    call = make_call(*tensors, layer[-1], results[0])
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    assert (hopper_decode.unsupported_reason(call, step_map.decode) is None) == is_hopper
    return results, step_map


def check(case, window=None):
    """err(kernel) <= 2 x err(dense attention in the same dtype) + eps, against float64; twice the same bits.

    Returns:
        The task map.
    """
    results, step_map = attend_twice(case, window)
    (out, lse), again = ([x.cpu() for x in result] for result in results)
    exact_out, exact_lse = case.oracle(window=window)
    assert not out.isnan().any()
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    error = (out.double() - exact_out).abs().max()
    bound = (plain_torch(case, window=window).double() - exact_out).abs().max()
    assert error <= 2 * bound + torch.finfo(case.q.dtype).eps / 8, f"{error:.1e}, plain torch {bound:.1e}"
    dead = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, dead)
    assert not out[dead].any()
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() < 1e-3
    return step_map


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 48, 64, 128, 320])
@pytest.mark.parametrize("seq_lens", [LONG, SHORT, PADDED], ids=["long", "short", "padded"])
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_decode(head_dim, seq_lens, block_size, dtype):
    """Heads cut into pieces for many programs; many sequences for one; dead rows between live ones."""
    check(decode_case(seq_lens, head_dim=head_dim, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 8), (2, 8), (3, 1), (4, 2), (8, 1), (16, 2)])
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_heads(head_dim, group, kv_heads):
    """Pieces are merged by their rows that can exist: as many as the group has heads."""
    if group * head_dim > 4096:
        pytest.skip("the portable kernel has its queries")
    check(decode_case([2100, 0, 64, 65, 33, 700], group=group, kv_heads=kv_heads, head_dim=head_dim))


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_several_tokens_of_a_sequence(head_dim, group):
    """The last tokens of a sequence see different keys, some of them a tile more than others."""
    lens = [4, 2000, 65, 34, 3, 1, 129]
    check(decode_case(lens, [4, 4, 3, 4, 2, 1, 2], group=group, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_prompts_beside(head_dim):
    """Sequences of another kernel: their rows are left alone, and they have no work here."""
    check(decode_case([200, 1300, 90, 0, 400, 64], [200, 1, 3, 1, 130, 1], head_dim=head_dim))


def test_nothing_is_read_for_units_that_do_not_exist(monkeypatch):
    """Trap: programs without work took block ids from where an unused record, which is not written, says."""
    empty = torch.empty

    def negative(*shape, **options):
        made = empty(*shape, **options)
        return made.fill_(-1234567) if made.dtype == torch.int32 else made

    monkeypatch.setattr(torch, "empty", negative)
    check(decode_case([200, 1300, 90, 0, 400, 64], [200, 1, 3, 1, 130, 1]))
    torch.cuda.synchronize()


@pytest.mark.parametrize("query_lens", [[1] * 6, [4, 1, 2, 1, 3, 1]])
@pytest.mark.parametrize("window", [1, 16, 100, 3000])
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_windows(head_dim, window, query_lens):
    lens = [500, 2500, 64, 1, 0, 33][::-1]
    check(decode_case(lens, query_lens[::-1], group=2, head_dim=head_dim), window)


@pytest.mark.parametrize("num_more", [1, 40])
@pytest.mark.parametrize("seq_lens", [SHORT, PADDED, [0, 0]], ids=["short", "padded", "dead"])
def test_rows_behind_the_last_sequence(seq_lens, num_more):
    """They get 0 and -inf, whatever their queries are."""
    case = decode_case(seq_lens)
    q = torch.cat([case.q, torch.full((num_more, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype)])
    positions = torch.cat([case.metadata.positions, torch.full((num_more,), 7, dtype=torch.int32)])
    check(replace(case, q=q, metadata=replace(case.metadata, positions=positions)))


def both_kinds_case(num_sequences, group=4):
    """A root of 640 tokens for all, 320 more for every three sequences; each has up to 70 of its own."""
    rows, lens = [], []
    for i in range(num_sequences):
        second, own = 10 + i // 3 * 5, 10 + num_sequences * 5 + 2 * i
        rows.append([*range(10), *range(second, second + 5), own, own + 1])
        lens.append(960 + 70 - i % 70)
    sizes = {"heads": 2 * group, "head_dim": 128, "block_size": 64, "dtype": torch.bfloat16}
    return make_case(lens, [1] * num_sequences, rows=rows, **sizes)


def check_leaves(case, planned=None):
    """check through a forest that follows the plan of a case, perhaps an earlier one."""
    forest = make_forest(case)
    forest.partial_out.fill_(torch.nan)
    forest.partial_lse.fill_(torch.nan)
    plan = upload(forest, planned or case)
    assert plan.num_units > 0
    step_map = check(replace(case, metadata=replace(case.metadata, work=forest)))
    if torch.cuda.get_device_capability()[0] == 9:
        leaf_shape = LEAF_SHAPE if case.q.shape[0] >= 128 else FEW_LEAVES_SHAPE
        wide = hopper_shapes.DECODE_SHAPES[case.q.shape[2]]
        assert step_map.decode.shape == (leaf_shape if case.q.shape[2] == 128 else wide)
    return plan


@pytest.mark.parametrize("num_sequences", [3, 40, 160, 500])
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_leaves(head_dim, num_sequences):
    check_leaves(shared_case([1] * num_sequences, head_dim=head_dim))


@pytest.mark.parametrize("own_tokens", [1, 64, 700])
@pytest.mark.parametrize("heads", [2, 4, 16, 32])
def test_leaves_of_other_lengths_and_heads(heads, own_tokens):
    check_leaves(shared_case([1] * 130, heads=heads, own_tokens=own_tokens))


@pytest.mark.parametrize("num_sequences", [40, 150])
def test_nodes_of_few_and_of_many_sequences(num_sequences):
    plan = check_leaves(both_kinds_case(num_sequences))
    units = torch.from_numpy(
        plan.fat_units if torch.cuda.get_device_capability()[0] == 9 else plan.thin_units
    )
    assert (units[:, 2] == 3).any()
    assert plan.fat_units[:, 2].max() > 3


@pytest.mark.parametrize("num_sequences", [12, 40, 150])
def test_dead_rows_in_a_stale_plan(num_sequences):
    """Every third row has died and left a table row of no blocks; nodes still have its tokens."""
    planned = both_kinds_case(num_sequences)
    metadata = planned.metadata
    seq_lens, table = metadata.seq_lens.clone(), metadata.block_table.clone()
    seq_lens[1::3] = 0
    table[1::3] = 1 << 30
    metadata = replace(metadata, seq_lens=seq_lens, positions=seq_lens - 1, block_table=table)
    check_leaves(replace(planned, metadata=metadata), planned)


@triton.jit
def _sleep_kernel(NANOSECONDS: tl.constexpr, OVERLAP: tl.constexpr):
    """Let the next kernels in, and make them wait."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < NANOSECONDS:
        now = tl.extra.cuda.globaltimer()


class Chain:
    """Layers of attention between projections, each with a cache of its own whose newest keys are missing."""

    def __init__(self, case, windows):
        moved = to_device(case)
        (num_blocks, block_size, num_kv_heads, head_dim), device = moved.k_cache.shape, moved.q.device
        self.num_heads, self.head_dim = moved.q.shape[1], head_dim
        self.windows = windows
        self.metadata = metadata = replace(moved.metadata, keys_are_old=True)
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads}
        self.cache = KVCache.allocate(
            num_layers=8, head_dim=head_dim, dtype=torch.bfloat16, device=device, **sizes
        )
        # A key that is read before it is stored makes the sequence's result NaN.
        self.cache.data.normal_()
        slots = metadata.slot_mapping[metadata.slot_mapping >= 0]
        for layer in map(self.cache.layer, range(8)):
            for part in (layer.k, layer.v):
                part[slots // block_size, slots % block_size] = torch.nan
        self.old = self.cache.data.clone()
        num_sequences, width = len(metadata.seq_lens), (self.num_heads + 2 * num_kv_heads) * head_dim
        size = self.num_heads * head_dim
        self.weights = [torch.randn(size, width, device=device).bfloat16() / size**0.5 for _ in range(8)]
        self.hidden = torch.empty(num_sequences, size, dtype=torch.bfloat16, device=device)
        self.start = torch.randn_like(self.hidden)
        self.rotations = torch.randn(2, num_sequences, head_dim // 2, device=device)

    def run(self):
        self.hidden.copy_(self.start)
        self.cache.data.copy_(self.old)
        step = TritonStep(self.cache, self.metadata, num_heads=self.num_heads)
        for layer, weight in enumerate(self.weights):
            window = self.windows[layer % len(self.windows)]
            options = LayerOptions(layer, 0, self.head_dim**-0.5, window, 0.0, None)
            qkv = self.hidden @ weight
            launch(_sleep_kernel, (1,), NANOSECONDS=50_000, **overlap_options(qkv))
            self.hidden += step.attend(qkv, self.rotations, options)


@pytest.mark.parametrize("block_size", [16, 64, 320])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("windows", [(None,), (None, 100)], ids=["all keys", "windows"])
@pytest.mark.parametrize(
    "seq_lens", [[700, 1, 0, 32, 33, 64, 65, 0, 31, 1500], [1 + 29 * i % 400 for i in range(200)]], ids=len
)
def test_kernels_before_may_still_run(seq_lens, windows, head_dim, block_size, monkeypatch):
    """What is read then is old: a tile with the new key waits until it is stored."""
    case = decode_case(seq_lens, head_dim=head_dim, block_size=block_size)
    metadata = case.metadata
    last = (metadata.seq_lens - 1).long()
    blocks = metadata.block_table[torch.arange(len(last)), last.clamp(min=0) // block_size]
    slots = torch.where(last < 0, -1, blocks.long() * block_size + last % block_size)
    chain = Chain(replace(case, metadata=replace(metadata, slot_mapping=slots)), windows)
    with monkeypatch.context() as patch:
        patch.setattr("octavo.kernels.launch.OVERLAP", False)
        chain.run()
    stored = chain.cache.data.view(torch.int16).clone()
    check_overlap(chain, monkeypatch)
    assert torch.equal(chain.cache.data.view(torch.int16), stored)
