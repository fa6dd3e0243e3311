"""Check and time stream_linear beside few_linear; prints as it goes."""

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from multiprocessing import get_context

sys.path[:0] = ["benchmarks", "."]

import torch
from gpu_linear import MODELS, microseconds, random_numbers

from octavo.layers.linear.grouped.few.gemm import few_linear
from octavo.layers.linear.grouped.stream import StreamTiling as T
from octavo.layers.linear.grouped.stream import stream_linear
from octavo.layers.linear.grouped.stream_tma import TmaTiling as M
from octavo.layers.linear.grouped.stream_tma import stream_tma
from octavo.layers.linear.grouped.weight import GroupedWeight

START = time.time()
LIMIT = float(sys.argv[1]) if len(sys.argv) > 1 else 95
SHAPES = [shape for shape in MODELS["8b"] if shape.name != "lm_head"]
ROWS = (1, 16, 4)
ONE = [
    T(32, 8, 3, 132), T(16, 8, 3, 264), T(32, 4, 4, 264), T(16, 8, 5, 132), M(2, 8, 3, 132, 128), M(1, 8, 4, 264, 80),
    T(32, 8, 3, 132, 2), T(16, 4, 6, 264, 4), T(32, 4, 3, 264, 4), T(16, 8, 4, 264, 2, 128), T(16, 16, 3, 132, 1),
    T(16, 4, 6, 396),
]
SIXTEEN = [T(32, 8, 3, 132, 1), T(16, 4, 6, 264, 2), T(16, 8, 5, 132, 1), M(2, 8, 3, 132, 168, 1)]
FOUR = [T(16, 4, 6, 264, 4), T(32, 8, 3, 132, 2), T(16, 8, 3, 264, 1, 128), T(32, 4, 3, 264, 4)]
TILINGS = {1: ONE, 16: SIXTEEN, 4: FOUR}


def packed(num_rows: int, size: int) -> GroupedWeight:
    """Random words, scales and minimums."""
    words = torch.randint(-(2**31), 2**31, (num_rows, size // 8), dtype=torch.int64, device="cuda").int()
    scales = torch.rand(size // 128, num_rows, device="cuda") * 0.5 + 0.5
    pairs = torch.stack((scales, -8 * scales + 0.1), 2).half().view(torch.int32)[..., 0].contiguous()
    return GroupedWeight(4, size, 128, words, pairs, 2.0**-9, None)


def fused(shape, rows):
    """x, options of a call."""
    x = random_numbers(rows, shape.size)
    options = {"activation": shape.activation}
    if shape.adds:
        options["residual"] = random_numbers(rows, shape.num_columns)
    if shape.has_norm and rows == 1:
        options |= {"norm_weight": random_numbers(shape.size) + 1, "eps": 1e-6}
    return x, options


def tilings(shape, rows):
    """One row of a long K does not fit into registers."""
    return [t for t in TILINGS[rows] if rows > 1 or shape.name != "down" or t.turns == 0]


def multiply(tiling):
    """The product by a tiling."""
    if tiling is None:
        return few_linear
    return partial(stream_tma if isinstance(tiling, M) else stream_linear, tiling=tiling)


def name_of(tiling):
    """How it is printed."""
    return "few" if tiling is None else f"{'MT'[isinstance(tiling, T)]}{astuple(tiling)}"


def compile_one(shape, rows, tiling):
    """Compile a variant into Triton's cache."""
    small = replace(shape, num_weight_rows=256)
    x, options = fused(small, rows)
    weight = packed(256, shape.size)
    try:
        multiply(tiling)(x, weight, **options)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__} {str(error)[:160]}"
    return ""


def reference(x, weight, options):
    """The result in float64."""
    x = x.double()
    if options.get("norm_weight") is not None:
        x = x * torch.rsqrt(x.square().mean(-1, True) + 1e-6) * options["norm_weight"].double()
        x = x.bfloat16().double()
    out = x @ weight.dequantise().double().T
    if options["activation"]:
        gate, up = out.chunk(2, -1)
        out = torch.nn.functional.silu(gate) * up
    if "residual" in options:
        out = out + options["residual"].double()
    return out


def main() -> None:
    jobs = [(s, r, t) for r in ROWS for s in SHAPES for t in [None, *tilings(s, r)]]
    bad = {}
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        for job, error in zip(jobs, pool.map(compile_one, *zip(*jobs, strict=True)), strict=True):
            if error:
                bad[job] = error
                print("FAILED", job[0].name, job[1], name_of(job[2]), error, flush=True)
    print(f"compiled {len(jobs)} after {time.time() - START:.0f} s", flush=True)
    table = {}
    for shape in SHAPES:
        nbytes = shape.num_weight_rows * shape.size * (0.5 + 4 / 128)
        weights = [packed(shape.num_weight_rows, shape.size) for _ in range(max(8, min(20, round(250e6 / nbytes))))]
        for rows in ROWS:
            x, options = fused(shape, rows)
            expected = reference(x, weights[0], options)
            for tiling in [None, *tilings(shape, rows)]:
                if (shape, rows, tiling) in bad or time.time() - START > LIMIT:
                    continue
                call = multiply(tiling)
                mine = dict(options)
                if "residual" in mine:
                    mine["residual"] = mine["residual"].clone()
                got = call(x, weights[0], **mine).double()
                error = ((got - expected).abs().max() / expected.abs().max()).item()
                us = microseconds(lambda weight, call=call, mine=mine: call(x, weight, **mine), weights, 3)
                name = name_of(tiling)
                table[shape.name, rows, name] = us
                print(f"{shape.name:8} {rows:3} {name:36} {us:7.2f} us  error {error:.5f}  bound {nbytes / 4.8e6:.2f}", flush=True)
    for rows in ROWS:
        print(f"--- {rows} rows, us: few, then the best of each")
        sums = [0.0, 0.0]
        for shape in SHAPES:
            times = {n: us for (s, r, n), us in table.items() if (s, r) == (shape.name, rows) and not n.endswith((", 1)", ", 2)"))}
            if "few" not in times:
                continue
            best = sorted(times.items(), key=lambda item: item[1])[:4]
            sums = [sums[0] + times["few"], sums[1] + best[0][1]]
            print(f"{shape.name:8} {times['few']:.2f}  " + "  ".join(f"{us:.2f} {name}" for name, us in best))
        print(f"layer {sums[0]:.1f} -> {sums[1]:.1f}")
    print(f"end after {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
