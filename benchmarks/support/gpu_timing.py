"""Measures time on an NVIDIA GPU: calls inside CUDA graphs, and the rates that bounds are computed from.

There are two of each rate, because recorded results used both: kernel benchmarks copy by a kernel inside a
CUDA graph, serving benchmarks by cudaMemcpy between events.
"""

import statistics
from collections.abc import Callable

import torch


def graph_seconds(call: Callable[[], object], num_calls: int = 10, num_replays: int = 15) -> float:
    """Median seconds of a call, measured as replays of a CUDA graph of several calls."""
    return statistics.median(graph_samples(call, num_calls, num_replays))


def graph_samples(call: Callable[[], object], num_calls: int = 10, num_replays: int = 15) -> list[float]:
    """Seconds of a call in each replay of a CUDA graph of several calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(num_replays)
    ]
    for _ in range(3):
        graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 / num_calls for begin, end in events]


def copy_rate() -> float:
    """Bytes per second of a 4 GiB copy by a kernel, counting what is read and what is written."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds(lambda: torch.neg(source, out=target), 2)


def matrix_rate() -> float:
    """Return the same as matrix_flops, measured inside a CUDA graph."""
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / graph_seconds(lambda: a @ b, 4)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by a 2 GiB copy on the device."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _event_s(lambda: target.copy_(source))


def matrix_flops() -> float:
    """Floating-point operations per second of a bfloat16 GEMM of 8192 x 8192 random matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _event_s(lambda: a @ b)


def _event_s(function: Callable[[], object], repeat: int = 10) -> float:
    """Median seconds of a call between two events, one call at a time."""
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[repeat // 2]
