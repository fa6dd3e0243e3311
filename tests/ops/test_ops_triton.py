"""The GPU's path of octavo.ops, appending and attention, in Triton's interpreter on a CPU."""

# Makes the interpreter fast and right before any kernel is defined.
import ops_cases
import pytest
import torch
from edge_rows import FORMS, check_dense_used, check_empty_rows, check_no_sequences
from fewer import fewer
from kvcache_cases import kvcache_case
from ops_cases import Maker, dense_case, varlen_case
from test_ops_matrix import check
from triton_cases import HAS_GPU

from octavo.attention import AttentionMetadata, gpu_paged
from octavo.attention.score_options import ScoreOptions
from octavo.ops import attend as attend_module
from octavo.ops import run_call
from octavo.ops.call import NewKeys, Queries, Rotary

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU runs the matrix itself")


@pytest.fixture
def _on_triton(monkeypatch):
    """Send CPU tensors the way of a GPU's."""
    from octavo.ops.triton.append_kernel import append

    def attend(q, cache, metadata, *, num_splits, **options):
        options = ScoreOptions(**options)
        return gpu_paged.paged_attention_with_lse(q, cache, metadata, options, num_splits=num_splits)

    monkeypatch.setattr(ops_cases, "takes_gpu_path", lambda x: True)
    monkeypatch.setattr(attend_module, "choose_for_call", lambda *_: "triton")
    monkeypatch.setattr(attend_module, "paged_attention_with_lse", attend)
    monkeypatch.setattr(attend_module, "is_on_gpu", lambda q: True)
    # Lengths on a GPU are not looked at.
    monkeypatch.setattr(AttentionMetadata, "check_lengths", lambda self: None)
    monkeypatch.setattr(run_call, "append", append)


def small(maker):
    """Shapes that the interpreter finishes in time."""
    draw = maker.shape

    def shape():
        draw()
        maker.head_dim, maker.v_dim = min(maker.head_dim, 40), min(maker.v_dim, 40)
        maker.batch = min(maker.batch, 2)

    maker.shape = shape
    maker.length = lambda edge: min(Maker.length(maker, edge), 70)
    return maker


@pytest.mark.usefixtures("_on_triton")
@pytest.mark.parametrize("seed", range(200_000, 200_020))
def test_agrees_with_the_oracle(seed):
    maker = small(Maker(seed, "cpu", (torch.float32, torch.float16)))
    kind = (kvcache_case, kvcache_case, varlen_case, dense_case)[seed % 4]
    check(kind(maker))


@pytest.mark.usefixtures("_on_triton")
@fewer("form", FORMS, every=3)
def test_a_row_of_negative_length_is_empty(form):
    check_empty_rows("cpu", torch.float32, *form)


@pytest.mark.usefixtures("_on_triton")
def test_dense_queries_that_do_not_count():
    check_dense_used("cpu")


@pytest.mark.usefixtures("_on_triton")
def test_no_sequences():
    check_no_sequences("cpu")


class Append:
    """Arguments of the append kernel: two sequences of 2 pages of 4 tokens, views of larger tensors."""

    def __init__(self):
        self.memory = torch.randn(2, 6, 4, 1, 8)
        self.before = self.memory.clone()
        # What lies beside the cache and the table belongs to others.
        self.caches = self.memory[:, 1:-1]
        self.table = torch.tensor([[0, 1, 1], [2, 3, 1]], dtype=torch.int32)[:, :2]
        self.angles = torch.full((2, 16, 4), torch.nan)[:, :8]
        self.angles[:] = 1.0
        self.k = self.v = torch.ones(2, 1, 8)
        self.cu_seqlens = None

    def run(self, lens, offsets=None):
        from octavo.ops.triton.append_kernel import append

        lens = torch.tensor(lens, dtype=torch.int32)
        length = 1 if self.cu_seqlens is None else 0
        new = NewKeys(self.k, self.v, self.cu_seqlens, length, lens, None, self.table, None, None)
        rotary = None
        if offsets is not None:
            rotary = Rotary(*self.angles, False, torch.tensor(offsets, dtype=torch.int32), True)
        q = torch.ones(2, 2, 8)
        return append(Queries(q, None, None, 1, 1), new, *self.caches, rotary)[0]

    def written(self):
        """(block, offset) of slots of self.memory that changed."""
        return (self.memory != self.before)[0].flatten(2).any(dim=2).nonzero().tolist()


@pytest.mark.parametrize(
    ("lens", "block", "expected"),
    [
        ([0, 7], None, [[1, 0], [4, 3]]),
        ([0, 8], None, [[1, 0]]),
        ([0, 0], -1, [[1, 0]]),
        ([0, 0], 4, [[1, 0]]),
    ],
)
def test_append_skips_what_has_no_slot(lens, block, expected):
    """On a GPU nobody looks at lengths and ids; a bad one must not reach memory of others."""
    case = Append()
    if block is not None:
        case.table[1, 0] = block
    case.run(lens)
    assert case.written() == expected


def test_append_skips_tokens_after_the_last_sequence():
    case = Append()
    case.k = case.v = torch.ones(4, 1, 8)
    case.cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32)
    case.run([0, 0])
    assert case.written() == [[1, 0], [3, 0]]


def test_append_reads_no_angle_beyond_the_table():
    case = Append()
    rotated = case.run([0, 0], offsets=[3, 8])
    assert bool((rotated[1] == 0).all())
    assert bool((case.caches[0, 2, 0] == 0).all())
    assert bool(rotated[0].isfinite().all())


def test_one_kernel_appends_any_number_of_tokens_to_any_table(monkeypatch):
    """Triton compiles another one where an integer is 1, and where it is a multiple of 16."""
    from octavo.ops.triton import append_kernel

    kinds = set()

    def kind(value):
        if isinstance(value, tuple):
            return tuple(map(kind, value))
        return (value == 1, value % 16 == 0) if type(value) is int else None

    def launch(kernel, grid, *arguments, **options):
        names = kernel.fn.__code__.co_varnames
        assert names[9] == "num_sequences"  # not specialised by name
        kinds.add((*map(kind, arguments[:9]), *arguments[10:]))

    monkeypatch.setattr(append_kernel, "launch", launch)
    for num_sequences in (1, 2, 16, 17):
        for width in (1, 2, 16, 17):
            rows = torch.ones(num_sequences, 2, 8)
            caches = torch.ones(2, width + num_sequences, 16, 2, 8)
            lens = torch.zeros(num_sequences, dtype=torch.int32)
            table = torch.zeros(num_sequences, width, dtype=torch.int32)
            new = NewKeys(rows, rows, None, 1, lens, None, table, None, None)
            angles = torch.ones(2, width * 16, 4)
            append_kernel.append(
                Queries(rows, None, None, 1, 1), new, *caches, Rotary(*angles, False, lens, True)
            )
    assert len(kinds) == 1


def test_float8_caches_are_read_in_pairs():
    """Kernels take two numbers at a time: none may begin at an odd address, or lie an odd number apart."""
    memory = torch.arange(2 * 3 * 2 * 8 + 64).to(torch.float8_e4m3fn)
    odd = (
        memory[1:97].view(2, 3, 2, 8),
        memory.as_strided((2, 3, 2, 8), (51, 16, 8, 1)),
        memory.as_strided((1, 3, 2, 8), (51, 16, 8, 1)),
        memory.as_strided((2, 3, 2, 7), (42, 14, 7, 1)),
    )
    for cache in odd:
        even = attend_module._even_cache(cache)
        assert not any(number % 2 for number in (even.storage_offset(), *even.stride()[:3], even.shape[3]))
        assert torch.equal(even[..., : cache.shape[3]].float(), cache.float())
    plain = memory[:96].view(2, 3, 2, 8)
    assert attend_module._even_cache(plain) is plain
