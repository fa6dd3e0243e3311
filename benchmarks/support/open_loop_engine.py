"""The engine's own loop: requests that arrive over time, and the first use of each sampling option."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from octavo import SamplingParams
from octavo.engine.engine import Engine
from octavo.outputs import RequestOutput

from .gpu_workloads import Workload
from .open_loop import Arrival, Trace

_SPECIAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "logprobs": {"logprobs": 5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "seed": {"seed": 1},
    "prompt_logprobs": {"prompt_logprobs": 2},
}
_PROMPT_LEN = 100


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> Trace:
    """Add requests when they are due and run steps until all are done.

    A step's time, and that of the tokens it delivers, includes adding the requests that were due before it.

    Raises:
        OctavoError: a request failed.
    """
    trace = Trace([[] for _ in arrivals], [0.0] * len(arrivals))
    due = deque(enumerate(arrivals))
    live: list[tuple[RequestOutput, list[float]]] = []
    begun = time.perf_counter()
    while due or engine.has_unfinished_requests:
        now = time.perf_counter() - begun
        while due and due[0][1].time_s <= now:
            number, arrival = due.popleft()
            trace.added[number] = time.perf_counter() - begun
            output = engine.add_request(arrival.prompt, _params(max_tokens=arrival.max_tokens))
            live.append((output, trace.token_times[number]))
        until_due = begun + due[0][1].time_s - time.perf_counter() if due else math.inf
        spare_s = engine.spare_s
        if spare_s > 0:
            # Whoever is due meanwhile joins the next step.
            time.sleep(max(0.0, min(spare_s, until_due)))
        elif engine.has_unfinished_requests:
            engine.step()
            then = time.perf_counter() - begun
            trace.steps.append(then - now)
            live = [entry for entry in live if _note(*entry, then)]
        else:
            time.sleep(max(0.0, until_due))
    for times, arrival in zip(trace.token_times, arrivals, strict=True):
        assert len(times) == arrival.max_tokens
    return trace


def closed_loop(engine: Engine, workload: Workload) -> float:
    """Tokens per second of requests that are there at once, each read token by token."""
    engine.reset_prefix_cache()
    begun = time.perf_counter()
    for prompt, num in zip(workload.prompts, workload.max_tokens, strict=True):
        engine.add_request(prompt, _params(max_tokens=num, n=workload.n))
    while engine.has_unfinished_requests:
        engine.step()
    return workload.num_output_tokens / (time.perf_counter() - begun)


def measure_special(
    engine: Engine, num_plain: int = 64, num_steps: int = 100, num_tokens: int = 16
) -> list[dict[str, Any]]:
    """Add one request for each option, one after the other, to requests that decode.

    Args:
        engine: with nothing to do.
        num_plain: requests that decode all the time.
        num_steps: plain steps before each option.
        num_tokens: output tokens of a request with an option.

    Returns:
        For each option, "plain" first: median and longest plain step before, longest step and number of
        steps while its request runs; ms.
    """
    plain = [
        engine.add_request(_prompt(number), _params(max_tokens=10_000), request_id=f"plain-{number}")
        for number in range(num_plain)
    ]
    _time_steps(engine, lambda: all(output.outputs[0].token_ids for output in plain))
    figures = []
    for number, (option, fields) in enumerate(_SPECIAL.items(), start=num_plain):
        left = iter(range(num_steps))
        before = _time_steps(engine, lambda left=left: next(left, None) is None)
        output = engine.add_request(_prompt(number), _params(max_tokens=num_tokens, **fields))
        during = _time_steps(engine, lambda output=output: output.finished)
        if output.error is not None:
            raise output.error
        figures.append(
            {
                "option": option,
                "median_plain_ms": statistics.median(before) * 1e3,
                "longest_plain_ms": max(before) * 1e3,
                "longest_ms": max(during) * 1e3,
                "steps": len(during),
            }
        )
    for output in plain:
        engine.abort(output.request_id)
    while engine.has_unfinished_requests:
        engine.step()
    return figures


def _time_steps(engine: Engine, is_done: Callable[[], bool]) -> list[float]:
    """Run steps until the function returns true, which is called before each of them; seconds of each."""
    seconds = []
    while not is_done():
        begun = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begun)
    return seconds


def _note(output: RequestOutput, times: list[float], now: float) -> bool:
    """Note the time of new tokens; returns whether more will come."""
    if output.error is not None:
        raise output.error
    times += [now] * (len(output.outputs[0].token_ids) - len(times))
    return not output.finished


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.6, ignore_eos=True, detokenize=False, **fields)


def _prompt(number: int) -> list[int]:
    """Prompts that begin differently, so that nothing of one is cached for another."""
    return [(number * 131 + place * 7 + 1) % 10_000 for place in range(_PROMPT_LEN)]
