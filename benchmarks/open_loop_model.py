"""Latency under load on paper: the engine's scheduler on a device that only takes time.

    python benchmarks/open_loop_model.py [--short-step-ms 0 16] [--max-step-ms 14]

A step of the modelled device takes

    launch + m (if it has prompts) + a * keys read for decoding + b * prompt tokens
           + c * prompt tokens * keys before them

with weights that were measured on an H200 (docs/log/step.md, "Latency under load"). Scheduler, block pool and
StepTime, which learns these weights from the steps, are the engine's own; each step is planned shortly before
the last one ends (ADR 25). Arrivals are those of gpu_open_loop.py, and bursts of streams that begin within
some milliseconds, as clients of a server do when their last answers ended together. --short-step-ms tries
other values of scheduled.SHORT_STEP_S. Needs no GPU. The last line is JSON.
"""

import argparse
import random
from array import array
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from support.common import make_parser, publish, table
from support.open_loop import Arrival, Trace, poisson_arrivals, summarise

from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.engine.step import scheduled
from octavo.engine.step.pace import StepTime, StepWork
from octavo.kv import KVCacheManager
from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams

# Seconds: launch, prompts, a decoding key, a prompt token, a token and key before it.
WEIGHTS = {
    "0.6b": (1.3e-3, 0.6e-3, 26e-9, 2.05e-6, 0.22e-9),
    "8b": (4.4e-3, 1.0e-3, 37e-9, 23.7e-6, 0.45e-9),
}
BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS, MAX_TOKENS = 64, 16384, 512, 8192
# A step is planned so long before the last one ends.
_PLAN_S = 2e-3
# Longer than a burst takes.
_PAUSE_S = 3.0


def bursts(streams: int, within_s: float) -> list[Arrival]:
    """Requests of 512 tokens in, 128 out, that arrive within a short time; four times, with pauses."""
    rng = random.Random(streams)
    begins = (number * _PAUSE_S for number in range(4))
    times = [begin + at for begin in begins for at in sorted(rng.random() * within_s for _ in range(streams))]
    return [Arrival(time, [rng.randrange(10000) for _ in range(512)], 128) for time in times]


LOADS = {
    "0.6b, 40 requests/s": ("0.6b", lambda: poisson_arrivals(40, 15, 0, (50, 4500), (20, 400))),
    "8b, 8 requests/s": ("8b", lambda: poisson_arrivals(8, 15, 0, (50, 4500), (20, 400))),
    "0.6b, 32 streams within 4 ms": ("0.6b", lambda: bursts(32, 4e-3)),
    "0.6b, 32 streams within 12 ms": ("0.6b", lambda: bursts(32, 12e-3)),
    "0.6b, 256 streams within 80 ms": ("0.6b", lambda: bursts(256, 80e-3)),
}


class Device:
    """Runs a scheduler's steps in virtual time."""

    def __init__(self, weights: Sequence[float], max_step_ms: float | None) -> None:
        self.now = 0.0
        self._weights = weights
        self._time = StepTime(max_step_ms)
        self._manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
        self._scheduler = Scheduler(self._manager, max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, number: int, arrival: Arrival) -> None:
        """Queue a request that is read along."""
        prompt = array("i", arrival.prompt)
        request = Request(
            request_id=str(number),
            index=0,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            params=SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True),
            max_num_tokens=len(prompt) + arrival.max_tokens,
            seed=0,
            stop_token_ids=frozenset(),
            blocks=self._manager.new_sequence(),
            metrics=RequestMetrics(),
        )
        self._scheduler.add(request)

    def step(self) -> list[int]:
        """Run a step until its end; return which requests got a token."""
        step = self._scheduler.schedule(self._time)
        self._scheduler.launch(step)
        seconds = self._seconds(step.work)
        self.now += seconds
        self._time.learn(step.work, seconds)
        got = []
        for item in step.scheduled:
            self._scheduler.commit(item)
            if item.samples:
                item.request.append_output(0)
                got.append(int(item.request.request_id))
                if item.request.finish_reason is not None:
                    self._scheduler.finish(item.request)
        return got

    def _seconds(self, work: StepWork) -> float:
        features = (1, work.num_prompt_tokens > 0, *work)
        return sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))


def run(arrivals: list[Arrival], device: Device) -> Trace:
    """Answer all requests."""
    trace = Trace([[] for _ in arrivals], [arrival.time_s for arrival in arrivals])
    queue = list(enumerate(arrivals))[::-1]
    while queue or device.has_work:
        if not device.has_work:
            device.now = max(device.now, queue[-1][1].time_s + _PLAN_S)
        while queue and queue[-1][1].time_s <= device.now - _PLAN_S + 1e-9:
            device.add(*queue.pop())
        begun = device.now
        for number in device.step():
            trace.token_times[number].append(device.now)
        trace.steps.append(device.now - begun)
    return trace


def measure(short_step_ms: float, max_step_ms: float | None) -> dict[str, Any]:
    """Figures of all loads by one rule."""
    found = {}
    with patch.object(scheduled, "SHORT_STEP_S", short_step_ms / 1e3):
        for load, (size, make) in LOADS.items():
            arrivals = make()
            seconds = max(1.0, arrivals[-1].time_s)
            found[load] = summarise(arrivals, run(arrivals, Device(WEIGHTS[size], max_step_ms)), seconds)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--short-step-ms", type=float, nargs="+", default=[0.0, scheduled.SHORT_STEP_S * 1e3])
    parser.add_argument("--max-step-ms", type=float, help="EngineConfig's option")
    arguments: argparse.Namespace = parser.parse_args()
    results = {limit: measure(limit, arguments.max_step_ms) for limit in arguments.short_step_ms}
    rows = [
        [load, f"{limit:g} ms", _line(figures["ttft_ms"]), _line(figures["inter_token_ms"])]
        for load in LOADS
        for limit, figures in ((limit, result[load]) for limit, result in results.items())
    ]
    print(table(["load", "shared up to", "first token ms: p50 / p90 / p99 / max", "between tokens"], rows))
    publish(
        "open_loop_model", {"results": {str(limit): found for limit, found in results.items()}}, arguments
    )


def _line(figures: dict[str, float]) -> str:
    return " / ".join(f"{figures[name]:.1f}" for name in ("p50", "p90", "p99", "max"))


if __name__ == "__main__":
    main()
