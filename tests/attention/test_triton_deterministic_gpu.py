"""Deterministic steps on a real GPU: a token's bits do not change with what it is computed beside."""

from itertools import pairwise

import pytest
import torch
from test_triton_deterministic import run_deterministic
from test_triton_gpu import plain_torch
from triton_cases import HAS_GPU, make_case, to_device

from octavo.attention import AttentionMetadata, gpu_paged
from octavo.attention.score_options import ScoreOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]
SEQ_LENS = [700, 64, 1, 333]
# First tokens of chunks: alone, across tiles, up to the end.
CUTS = [0, 1, 2, 63, 64, 65, 200, 330, 331, 332, 333, 699, 700]


def attend(moved, parts, scores):
    """Attend tokens begin : end of sequences in one step, parts [(sequence, begin, end)]; (out, lse)."""
    device = moved.q.device
    starts = moved.metadata.cu_seqlens_q.tolist()
    positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
    rows = torch.cat([starts[s] + torch.arange(begin, end) for s, begin, end in parts])
    lens = [end - begin for _, begin, end in parts]

    def integers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    metadata = AttentionMetadata(
        cu_seqlens_q=integers([0, *torch.tensor(lens).cumsum(0).tolist()]),
        seq_lens=integers([end for *_, end in parts]),
        positions=positions.int().to(device),
        slot_mapping=torch.zeros(len(rows), dtype=torch.int64, device=device),
        block_table=moved.metadata.block_table[[s for s, *_ in parts]].contiguous(),
        max_query_len=max(lens),
        max_seq_len=max(end for *_, end in parts),
    )
    q = moved.q[rows.to(device)]
    step_map = gpu_paged.make_step_map(q, moved.cache, metadata, scores.window, deterministic=True)
    return gpu_paged.attend_with_map(q, moved.cache, metadata, scores, step_map)


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 20.0}])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (8, 4, 128, 64, torch.bfloat16),
        (9, 3, 64, 16, torch.bfloat16),
        (8, 1, 80, 256, torch.float16),
        (4, 4, 256, 64, torch.bfloat16),
        (8, 4, 32, 16, torch.float32),
    ],
)
def test_chunks_and_neighbours_change_no_bit(heads, kv_heads, head_dim, block_size, dtype, options):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    moved = to_device(make_case(SEQ_LENS, SEQ_LENS, **sizes, dtype=dtype))
    scores = ScoreOptions(head_dim**-0.5, **options)
    whole = attend(moved, [(s, 0, seq_len) for s, seq_len in enumerate(SEQ_LENS)], scores)
    starts = moved.metadata.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(SEQ_LENS):
        cuts = [cut for cut in CUTS if cut < seq_len] + [seq_len]
        for begin, end in pairwise(cuts):
            chunk = slice(starts[s] + begin, starts[s] + end)
            alone = attend(moved, [(s, begin, end)], scores)
            beside = attend(moved, [(0, 5, 9), (s, begin, end), (3, 299, 300)], scores)
            for got, mixed, expected in zip(alone, beside, whole, strict=True):
                assert torch.equal(got, expected[chunk]), (s, begin, end)
                assert torch.equal(mixed[4 : 4 + end - begin], expected[chunk]), (s, begin, end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_close_to_the_oracle_as_other_maps(dtype):
    case = make_case(SEQ_LENS, [600, 1, 1, 33], heads=8, head_dim=128, block_size=64, dtype=dtype)
    exact_out, exact_lse = case.oracle()
    out, lse = run_deterministic(case)
    error, bound = ((x.double() - exact_out).abs().max() for x in (out, plain_torch(case)))
    assert error <= 2 * bound + torch.finfo(dtype).eps / 8
    assert (lse - exact_lse).abs().max() < 1e-3


def test_replays_in_a_cuda_graph_with_other_lengths():
    """One captured step serves later lengths; dead places get 0 and -inf."""
    moved = to_device(make_case([900, 300, 64], [1, 1, 1], head_dim=64, block_size=64, dtype=torch.bfloat16))
    scores = ScoreOptions(0.125)

    def step():
        step_map = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata, deterministic=True)
        return gpu_paged.attend_with_map(moved.q, moved.cache, moved.metadata, scores, step_map)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for seq_lens in ([900, 300, 64], [1, 0, 63], [500, 257, 0]):
        moved.metadata.seq_lens.copy_(torch.tensor(seq_lens))
        moved.metadata.positions.copy_(torch.tensor(seq_lens) - 1)
        graph.replay()
        expected = step()
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        dead = torch.tensor(seq_lens) == 0
        assert (lse.cpu() == -torch.inf).all(dim=1).tolist() == dead.tolist()
        assert not out[dead.cuda()].any()
