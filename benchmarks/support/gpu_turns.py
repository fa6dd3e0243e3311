"""Times operators against each other on an NVIDIA GPU: inside CUDA graphs in turn, and eagerly."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

# Does its work on the cache of this number.
Call = Callable[[int], object]

_GRAPH_US, _MOST_ROUNDS, _NUM_REPLAYS, _EAGER_CALLS, _EAGER_ROUNDS = 2000, 20, 9, 10, 5
# A launch takes about as long.
_LEAST_US = 4


def graphs_us(calls: Sequence[Call], num_caches: int, about_us: float) -> list[float]:
    """Median microseconds of each call, from CUDA graphs that are replayed in turn.

    Args:
        calls: each called before; graph after graph, so that none has the GPU cooler than the others.
        num_caches: each graph goes through all, once or more often.
        about_us: a guess of the fastest call's microseconds, which sets how often.
    """
    rounds = max(1, min(round(_GRAPH_US / (max(about_us, _LEAST_US) * num_caches)), _MOST_ROUNDS))
    graphs = [_capture(call, num_caches, rounds) for call in calls]
    events = [
        [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in graphs]
        for _ in range(_NUM_REPLAYS)
    ]
    for graph in graphs * 2:
        graph.replay()
    for replay in events:
        for graph, (begin, end) in zip(graphs, replay, strict=True):
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    times = [[begin.elapsed_time(end) for begin, end in replay] for replay in events]
    return [statistics.median(own) * 1e3 / (rounds * num_caches) for own in zip(*times, strict=True)]


def _capture(call: Call, num_caches: int, rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for number in range(num_caches):
                call(number)
    return graph


def eager_us(call: Call, num_caches: int) -> tuple[float, float]:
    """Median microseconds of a call of several in a row: until it returns, and until the GPU is done."""
    rounds = []
    for _ in range(_EAGER_ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for number in range(_EAGER_CALLS):
            call(number % num_caches)
        returned = time.perf_counter()
        torch.cuda.synchronize()
        rounds.append((returned - begun, time.perf_counter() - begun))
    host, whole = (statistics.median(times) * 1e6 / _EAGER_CALLS for times in zip(*rounds, strict=True))
    return host, whole
