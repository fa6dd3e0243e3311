"""octavo.ops on this CPU beside torch's SDPA: milliseconds a call, in the same run, and the memory bound.

    python benchmarks/cpu_ops.py [--repeats 20] [--save MACHINE]

SDPA gets what the call needs from a paged cache: keys and values gathered into dense tensors, and first new
ones written and rotated where the call does so. `attention` is its share, over tensors dense already.
`first` is the first call of a shape, before anything is kept for the next one. The bound is the bytes of keys
and values over the measured copy bandwidth; a fraction above 1 means that the CPU's caches still held them.
Other processes distort every number, most of all with several threads: on a busy machine, OMP_NUM_THREADS=1.
The last line is JSON.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cpu_attention import copy_bandwidth
from support.common import make_parser, publish
from torch import Tensor
from torch.nn import functional

from octavo.ops import flash_attn_with_kvcache


@dataclass(frozen=True, slots=True)
class Shape:
    """B sequences of seq_len keys in pages; the last query_len are new, stored and rotated if `appends`."""

    name: str
    num_sequences: int
    seq_len: int
    query_len: int
    appends: bool = False
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    page: int = 16


SHAPES = (
    Shape("tiny 1 x 32", 1, 32, 1),
    Shape("tiny 1 x 32, append", 1, 32, 1, appends=True),
    Shape("decode 16 x 1024", 16, 1024, 1),
    Shape("decode 16 x 1024, append + rotary", 16, 1024, 1, appends=True),
    Shape("prefill 1 x 1024", 1, 1024, 1024),
    Shape("prefill 8 x 128", 8, 128, 128),
)


class Calls:
    """One shape's tensors, and the calls that are timed."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        width = -(-shape.seq_len // shape.page)
        num_blocks = shape.num_sequences * width
        self.caches = torch.randn(2, num_blocks, shape.page, shape.kv_heads, shape.head_dim)
        # Blocks lie in random order, as after a while of serving.
        self.table = torch.randperm(num_blocks, dtype=torch.int32).view(shape.num_sequences, width)
        rows = (shape.num_sequences, shape.query_len)
        self.q = torch.randn(*rows, shape.heads, shape.head_dim)
        self.new = torch.randn(2, *rows, shape.kv_heads, shape.head_dim)
        angle = torch.rand(shape.seq_len, shape.head_dim // 2) * 6.3
        self.angles = torch.stack([angle.cos(), angle.sin()])
        self.cached = shape.seq_len - shape.query_len if shape.appends else shape.seq_len
        self.lens = torch.full((shape.num_sequences,), self.cached, dtype=torch.int32)
        self.dense = self.gather()

    def ours(self) -> Tensor:
        new = (*self.new, *self.angles) if self.shape.appends else ()
        return flash_attn_with_kvcache(
            self.q, *self.caches, *new, cache_seqlens=self.lens, block_table=self.table, causal=True
        )

    def gather(self) -> Tensor:
        """Return keys and values [2, B, S, KH, D] of the cache."""
        return self.caches[:, self.table.long()].flatten(2, 3)

    def peer(self) -> Tensor:
        """Write, rotate, gather and attend, as one does without a paged operator."""
        q, table = self.q, self.table.long()
        if self.shape.appends:
            cos, sin = (x[self.cached].repeat_interleave(2) for x in self.angles)
            q, k = (_turned(x, cos, sin) for x in (q, self.new[0]))
            block, offset = table[:, self.cached // self.shape.page], self.cached % self.shape.page
            self.caches[0, block, offset], self.caches[1, block, offset] = k[:, 0], self.new[1, :, 0]
        return self.attend(q, self.gather())

    def attend(self, q: Tensor, dense: Tensor) -> Tensor:
        """SDPA; bottom-right and top-left masks are one here, as queries are one or all."""
        q, k, v = (x.transpose(1, 2) for x in (q, *dense))
        is_causal = self.shape.query_len > 1
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    def check(self) -> float:
        """Return the largest difference between the two."""
        return (self.ours() - self.peer()).abs().max().item()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cos + other * sin


def spread_ms(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return (best, median) milliseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return times[0], times[len(times) // 2]


def measure(shape: Shape, bandwidth: float, repeats: int) -> dict[str, float | str]:
    """Time both, in turns, so that a noisy minute hits them alike."""
    calls = Calls(shape)
    first = spread_ms(calls.ours, 1)[0]
    difference = calls.check()
    assert difference < 1e-4, f"{shape.name}: octavo.ops and SDPA differ by {difference:.3g}"
    timed = {"ours": calls.ours, "sdpa": calls.peer, "attention": lambda: calls.attend(calls.q, calls.dense)}
    rounds = [{name: spread_ms(call, repeats) for name, call in timed.items()} for _ in range(3)]
    best, median = ({name: min(turn[name][which] for turn in rounds) for name in timed} for which in (0, 1))
    bound = calls.dense.nbytes / bandwidth * 1e3
    row: dict[str, float | str] = {"shape": shape.name, "first_ms": first, "difference": difference}
    row |= {f"{name}_ms": value for name, value in best.items()}
    row |= {f"{name}_median_ms": value for name, value in median.items()}
    row |= {"bound_ms": bound, "fraction": bound / best["ours"]}
    row |= {"speedup": best["sdpa"] / best["ours"], "attention_speedup": best["attention"] / best["ours"]}
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(arguments.repeats)
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    print(f"{threads} threads, copy {bandwidth / 1e9:.1f} GB/s, load {load:.1f}")
    columns = ("first", "ours", "ours_median", "sdpa", "attention", "bound")
    names = [*(f"{name}_ms" for name in columns), "fraction", "speedup"]
    print(f"{'best ms per call':34}" + "".join(f"{name.removesuffix('_ms'):>12}" for name in names))
    rows = []
    with torch.inference_mode():
        for shape in SHAPES:
            rows.append(measure(shape, bandwidth, arguments.repeats))
            print(f"{shape.name:34}" + "".join(f"{rows[-1][name]:12.3f}" for name in names), flush=True)
    figures = {"threads": threads, "copy_bytes_per_s": bandwidth, "load": load, "rows": rows}
    publish("cpu_ops", figures, arguments)


if __name__ == "__main__":
    main()
