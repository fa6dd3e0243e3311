"""Random calls of octavo.ops and a dense oracle that follows flash-attention's words, not Octavo's code.

The oracle cuts each sequence's keys out, counts positions from its first key (so left padding is gone), and
masks a full [Lq, Lk] matrix. In float64 it is the truth; in a call's own dtype it is what torch makes of it.
"""

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.ops import flash_attn_func, flash_attn_varlen_func

HEAD_DIMS = (1, 8, 16, 32, 40, 59, 64, 72, 80, 96, 112, 128, 160, 192, 256)
PAGES = (None, 1, 7, 16, 64, 256)
FLOAT8 = torch.float8_e4m3fn
EPSILON = 1e-5


def takes_gpu_path(x):
    """A test may send CPU tensors the same way."""
    return x.device.type == "cuda"


@dataclass
class OpsCase:
    """One call: its function, its arguments, and each sequence's dense queries, keys and values."""

    function: Any
    arguments: dict[str, Any]
    dtype: torch.dtype
    sequences: list["Sequence"]
    num_rows: int
    dense_rows: int | None
    expected_caches: list[torch.Tensor] = field(default_factory=list)

    def run(self):
        """Return (out [T, H, Dv], lse [T, H]) of the call."""
        out, lse, *_ = self.function(**self.arguments)
        if self.dense_rows is not None:
            lse = lse.transpose(1, 2).flatten(0, 1)
            out = out.flatten(0, 1)
        else:
            lse = lse.T
        return out, lse

    @property
    def product_dtype(self):
        """The dtype of torch that a call is as precise as: a GPU multiplies float8 caches in float16."""
        is_float8 = any(x.dtype == FLOAT8 for x in self.arguments.values() if isinstance(x, torch.Tensor))
        in_kernel = self.dtype == torch.float32 and takes_gpu_path(self.sequences[0].q)
        return torch.float16 if is_float8 and in_kernel else self.dtype

    def oracle(self, dtype, kept=None):
        """Return (out [T, H, Dv], lse [T, H]) computed in a dtype; kept: see Sequence.attend."""
        first = self.sequences[0]
        num_heads = first.q.shape[1]
        out = torch.zeros(self.num_rows, num_heads, first.v.shape[2], dtype=dtype, device=first.q.device)
        lse = torch.full((self.num_rows, num_heads), -torch.inf, dtype=dtype, device=first.q.device)
        sinks = self.arguments.get("s_aux")
        if sinks is not None:
            lse[:] = sinks.to(dtype)
        for sequence in self.sequences:
            rows = slice(sequence.first_row, sequence.first_row + sequence.q.shape[0])
            out[rows], lse[rows] = sequence.attend(self.arguments, dtype, kept)
        return out, lse


@dataclass
class Sequence:
    """q [Lq, H, D], k [Lk, KH, D], v [Lk, KH, Dv] in float64, rotated and scaled; slopes [H] or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None
    first_row: int

    def attend(self, arguments, dtype, kept=None):
        """Attend in a dtype. kept: round weights to it before they meet values, as on tensor cores."""
        num_queries, num_keys = self.q.shape[0], self.k.shape[0]
        q, k, v = (x.to(dtype).transpose(0, 1) for x in (self.q, self.k, self.v))
        group = q.shape[0] // k.shape[0]
        k, v = (x.unsqueeze(1).expand(-1, group, -1, -1).flatten(0, 1) for x in (k, v))
        scale = arguments.get("softmax_scale") or self.q.shape[-1] ** -0.5
        scores = (q * scale) @ k.transpose(1, 2)
        if arguments.get("softcap"):
            scores = torch.tanh(scores / arguments["softcap"]) * arguments["softcap"]
        i = torch.arange(num_queries, device=q.device)[:, None] + num_keys - num_queries
        j = torch.arange(num_keys, device=q.device)[None, :]
        if self.slopes is not None:
            scores = scores - (self.slopes[:, None, None] * (i - j).abs()).to(dtype)
        left, right = (int(side) for side in arguments["window_size"])
        if arguments["causal"]:
            right = 0
        hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool, device=q.device)
        if left >= 0:
            hidden |= j < i - left
        if right >= 0:
            hidden |= j > i + right
        scores = scores.masked_fill(hidden, -torch.inf)
        sinks = arguments.get("s_aux")
        if sinks is not None:
            column = sinks.to(dtype)[:, None, None].expand(-1, num_queries, 1)
            scores = torch.cat([scores, column], dim=2)
            v = torch.cat(
                [v, torch.zeros_like(v[:, :1])] if num_keys else [v.new_zeros(q.shape[0], 1, v.shape[2])],
                dim=1,
            )
        if scores.shape[2] == 0:
            return 0.0, -torch.inf
        lse = torch.logsumexp(scores, dim=-1)
        if kept is None:
            out = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v
        else:
            weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True)).nan_to_num(0.0)
            out = (weights.to(kept).to(dtype) @ v / weights.sum(dim=-1, keepdim=True)).nan_to_num(0.0)
        return out.transpose(0, 1), lse.transpose(0, 1)


class Maker:
    """Draws the arguments of calls from a seed.

    Makers with the same kernel_seed agree on shapes, options and layouts, which decide what a GPU compiles;
    lengths and numbers differ.
    """

    def __init__(self, seed, device, dtypes, kernel_seed=None):
        self.random = random.Random(seed)
        self.kernel_seed = seed if kernel_seed is None else kernel_seed
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtypes = device, dtypes

    def agreed(self, name, values):
        """The same for all makers with this kernel_seed."""
        return random.Random(f"{self.kernel_seed} {name}").choice(values)

    def agreed_some(self, name, share):
        return random.Random(f"{self.kernel_seed} {name}").random() < share

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def ints(self, values):
        kind = self.agreed("ints", (torch.int32, torch.int32, torch.int64))
        return torch.tensor(values, dtype=kind, device=self.device)

    def some(self, share):
        return self.random.random() < share

    def shape(self):
        self.dtype = self.agreed("dtype", self.dtypes)
        self.head_dim = self.agreed("head_dim", HEAD_DIMS)
        self.v_dim = self.agreed("v_dim", HEAD_DIMS) if self.agreed_some("has_v_dim", 0.15) else self.head_dim
        heads = ((1, 1), (1, 3), (2, 2), (3, 2), (4, 1), (5, 1), (8, 2), (16, 1))
        self.group, self.kv_heads = self.agreed("heads", heads)
        self.heads = self.group * self.kv_heads
        self.page = self.agreed("page", PAGES)
        self.batch = self.agreed("batch", (1, 1, 2, 3, 5))

    def options(self):
        given = {
            "causal": self.agreed("causal", (False, True)),
            "window_size": self.agreed("windowed", ((-1, -1), (-1, -1), None)) or self.window(),
            "softcap": self.agreed("softcap", (0.0, 0.0, 0.0, 1.5, 30.0)),
            "num_splits": self.agreed("num_splits", (0, 0, 1, 3)),
        }
        if self.some(0.2):
            given["softmax_scale"] = self.random.choice((0.05, 0.3))
        slopes = self.agreed("slopes", (None, None, (self.heads,), (self.batch, self.heads)))
        if slopes is not None:
            given["alibi_slopes"] = torch.rand(slopes, generator=self.generator).to(self.device) * 0.3
        if self.agreed_some("s_aux", 0.2):
            given["s_aux"] = self.normal(self.heads).float().to(self.device)
        return given

    def window(self):
        sides = self.random.choice(((0, 0), (3, 5), (17, -1), (-1, 2), (64, 0), (300, 300), (5, 64)))
        return self.random.choice((tuple, list, torch.tensor))(sides)

    def length(self, edge):
        return max(0, self.random.choice((0, 1, edge - 1, edge, edge + 1, 2 * edge, 33, 70)))

    def rows(self, num, heads, dim, dtype=None):
        """Return random numbers [num, heads, dim] in the call's dtype."""
        return self.normal(num, heads, dim).to(dtype or self.dtype).to(self.device)

    def awkward(self, name, x):
        """Return x, sometimes with other strides."""
        kind = self.agreed(name, ("plain", "plain", "last", "padded"))
        if kind == "last" and x.dim() > 1:
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        if kind == "padded":
            return torch.cat([x, x[..., :1]], dim=-1)[..., :-1]
        return x


def slopes_of(given, row):
    slopes = given.get("alibi_slopes")
    return slopes[row] if slopes is not None and slopes.dim() == 2 else slopes


def rotated(x, cos, sin, positions, interleaved):
    """Rotate x [n, heads, D] by complex numbers; rounded to the dtype of x, as the call must."""
    half = cos.shape[1]
    wide = x.double()
    turned, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    pairs = (
        turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    )
    angle = torch.complex(cos.double(), sin.double())[positions.long()].unsqueeze(1)
    product = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * angle)
    product = product.flatten(-2) if interleaved else product.transpose(-1, -2).flatten(-2)
    return torch.cat([product, rest], dim=-1).to(x.dtype)


def dense_case(maker):
    """flash_attn_func."""
    maker.shape()
    given = maker.options()
    edge = maker.random.choice((16, 64))
    num_queries, num_keys = max(1, maker.length(edge)), maker.length(edge)
    q = maker.rows(maker.batch * num_queries, maker.heads, maker.head_dim).unflatten(0, (maker.batch, -1))
    k = maker.rows(maker.batch * num_keys, maker.kv_heads, maker.head_dim)
    v = maker.rows(maker.batch * num_keys, maker.kv_heads, maker.v_dim)
    k, v = (x.unflatten(0, (maker.batch, num_keys)) for x in (k, v))
    sequences = [
        Sequence(q[b].double(), k[b].double(), v[b].double(), slopes_of(given, b), b * num_queries)
        for b in range(maker.batch)
    ]
    given |= {name: maker.awkward(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    given["return_attn_probs"] = True
    return OpsCase(flash_attn_func, given, maker.dtype, sequences, maker.batch * num_queries, num_queries)


def varlen_case(maker):
    """flash_attn_varlen_func with ragged or paged keys."""
    maker.shape()
    given = maker.options()
    page = maker.page
    edge = page or 16
    query_lens = [maker.random.choice((0, 1, 2, 17, 65)) for _ in range(maker.batch)]
    key_lens = [maker.length(edge) for _ in range(maker.batch)]
    q = maker.rows(sum(query_lens) + maker.random.choice((0, 0, 3)), maker.heads, maker.head_dim)
    k = maker.rows(sum(key_lens), maker.kv_heads, maker.head_dim)
    v = maker.rows(sum(key_lens), maker.kv_heads, maker.v_dim)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).tolist() for lens in (query_lens, key_lens))
    used_q, used_k = query_lens, key_lens
    if maker.some(0.3):
        used_q = [maker.random.randint(0, n) for n in query_lens]
        given["seqused_q"] = maker.ints(used_q)
    if maker.some(0.3) or (page and maker.some(0.5)):
        used_k = key_lens if page else [maker.random.randint(0, n) for n in key_lens]
        given["seqused_k"] = maker.ints(used_k)
    if page is None or "seqused_k" not in given:
        given["cu_seqlens_k"] = maker.ints(cu_k)
    sequences = [
        Sequence(
            q[cu_q[b] : cu_q[b] + used_q[b]].double(),
            k[cu_k[b] : cu_k[b] + used_k[b]].double(),
            v[cu_k[b] : cu_k[b] + used_k[b]].double(),
            slopes_of(given, b),
            cu_q[b],
        )
        for b in range(maker.batch)
    ]
    if page is not None:
        table, (k, v) = paged(maker, page, [k, v], cu_k)
        given["block_table"] = table.to(torch.int32)
    given |= {name: maker.awkward(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    given |= {
        "cu_seqlens_q": maker.ints(cu_q),
        "max_seqlen_q": max(query_lens),
        "max_seqlen_k": max(key_lens),
    }
    given["return_softmax_lse"] = True
    return OpsCase(flash_attn_varlen_func, given, maker.dtype, sequences, q.shape[0], None)


def paged(maker, page, rows, cu):
    """Scatter ragged rows into NaN pages; table entries past a sequence's end are garbage."""
    counts = [-(-(end - begin) // page) for begin, end in itertools.pairwise(cu)]
    num_blocks = sum(counts) + 2
    ids = torch.randperm(num_blocks, generator=maker.generator).tolist()
    table = torch.full((len(counts), max(counts) + maker.random.choice((0, 1))), -7)
    caches = [
        torch.full((num_blocks, page, *x.shape[1:]), torch.nan, device=maker.device).to(x.dtype) for x in rows
    ]
    for b, (begin, end) in enumerate(itertools.pairwise(cu)):
        table[b, : counts[b]] = torch.tensor([ids.pop() for _ in range(counts[b])])
        for i in range(counts[b]):
            part = slice(begin + i * page, min(begin + (i + 1) * page, end))
            for cache, x in zip(caches, rows, strict=True):
                cache[table[b, i], : part.stop - part.start] = x[part]
    return table.to(maker.device), caches
