"""Five times what a server can do: who is refused knows at once, who is taken waits a bounded time.

Capacity is measured first, with as many clients as the engine runs at a time. Then requests come at random
times (Poisson) at a multiple of it, and at last clients ask one by one until the server is as fast as before.
On a machine with busy neighbours the clients themselves are late: how late, and what the server's log says
about the same refusals, is reported beside what they saw.

    python tests/server/stress/overload.py [--seconds 60] [--times 5] [--save MACHINE]
"""

import asyncio
import random
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

from server_process import ServerProcess
from stream_client import TEXT, post
from stress_report import make_parser, percentile, report

RUNNING, QUEUED, NUM_TOKENS = 8, 16, 48
OPTIONS = (
    *("--max-num-seqs", str(RUNNING), "--max-num-queued-reqs", str(QUEUED)),
    *("--num-blocks", "512", "--access-log"),
)
MAX_REFUSAL_S, MAX_RECOVERY_S = 0.05, 5.0
_LOGGED_REFUSAL = re.compile(r" 429 ([0-9.]+) s$", re.MULTILINE)
_TICK_S = 0.005


@dataclass
class Outcome:
    """What a client saw: the status, its Retry-After, seconds to the status and to the first event."""

    status: int
    retry_after: str | None
    status_s: float
    first_s: float


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=5.0)
    arguments = parser.parse_args()
    with ServerProcess(*OPTIONS) as server:
        figures = asyncio.run(measure(server, arguments.seconds, arguments.times))
    return report("overload", figures, arguments)


async def measure(server: ServerProcess, seconds: float, times: float) -> dict[str, Any]:
    """Measure capacity, overload, recovery; return figures and failures."""
    rate = await _capacity(server.port, min(seconds, 5.0))
    rss_before = server.rss_bytes()
    cpu_s, lags = server.cpu_s(), list[float]()
    watch = asyncio.create_task(_note_lags(lags))
    outcomes, failures = await _offered(server.port, rate * times, seconds)
    watch.cancel()
    cpu_s = server.cpu_s() - cpu_s
    recovery_s = await _recovery(server.port)
    refused = [one for one in outcomes if one.status == 429]
    taken = [one.first_s for one in outcomes if one.status == 200]
    refusal_s = percentile([one.status_s for one in refused], 99)
    first_s = percentile(taken, 99)
    # What may wait in front, and what runs, at the measured rate; twice, as the load takes CPU too.
    bound_s = 2 * (QUEUED + RUNNING) / rate
    logged = [float(found) for found in _LOGGED_REFUSAL.findall(server.errors())]
    odd = {one.status for one in outcomes} - {200, 429}
    limits = {
        f"statuses {odd}": bool(odd),
        "nobody was refused": not refused,
        "a 429 has no Retry-After": any(one.retry_after is None for one in refused),
        f"refusals took {refusal_s * 1e3:.0f} ms": refusal_s > MAX_REFUSAL_S,
        f"TTFT p99 is {first_s:.2f} s, the bound {bound_s:.2f} s": first_s > bound_s,
        f"recovery took {recovery_s:.1f} s": recovery_s > MAX_RECOVERY_S,
    }
    failures += [text for text, is_broken in limits.items() if is_broken]
    failures += [f"left: {left}" for left in [server.leftovers()] if left]
    return {
        "capacity_per_s": rate,
        "offered_per_s": rate * times,
        "sent_per_s": len(outcomes) / seconds,
        "seconds": seconds,
        "taken": len(taken),
        "refused": len(refused),
        "refusal_p50_ms": percentile([one.status_s for one in refused], 50) * 1e3,
        "refusal_p99_ms": refusal_s * 1e3,
        "logged_refusal_p50_ms": percentile(logged, 50) * 1e3,
        "logged_refusal_p99_ms": percentile(logged, 99) * 1e3,
        "client_lag_p99_ms": percentile(lags, 99) * 1e3,
        "server_cores": cpu_s / seconds,
        "ttft_p50_s": percentile(taken, 50),
        "ttft_p99_s": first_s,
        "ttft_bound_s": bound_s,
        "recovery_s": recovery_s,
        "rss_growth_mb": (server.rss_bytes() - rss_before) / 1e6,
        "failures": failures,
    }


async def _capacity(port: int, seconds: float) -> float:
    """Requests per second of a server that is busy, but not more than that."""
    until = time.monotonic() + seconds

    async def client() -> int:
        num_done = 0
        while time.monotonic() < until:
            num_done += (await _ask(port)).status == 200
        return num_done

    return sum(await asyncio.gather(*(client() for _ in range(RUNNING)))) / seconds


async def _offered(port: int, rate: float, seconds: float) -> tuple[list[Outcome], list[str]]:
    """Send requests at random times, whatever becomes of those before."""
    rng, failures = random.Random(1), list[str]()
    tasks: list[asyncio.Task[Outcome]] = []
    begun = due = time.monotonic()
    while due < begun + seconds:
        await asyncio.sleep(due - time.monotonic())
        tasks.append(asyncio.create_task(_ask(port)))
        due += rng.expovariate(rate)
    outcomes: list[Outcome] = []
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(found, Outcome):
            outcomes.append(found)
        else:
            failures.append(f"a client saw {found!r}")
    return outcomes, failures


async def _note_lags(lags: list[float]) -> None:
    """Note how late this process is woken, as long as it is not cancelled."""
    while True:
        due = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags.append(time.monotonic() - due)


async def _recovery(port: int) -> float:
    """Seconds until a request is taken and begins within half a second."""
    begun = time.monotonic()
    while time.monotonic() - begun < 4 * MAX_RECOVERY_S:
        outcome = await _ask(port, num_tokens=1)
        if outcome.status == 200 and outcome.first_s < 0.5:
            break
    return time.monotonic() - begun


async def _ask(port: int, num_tokens: int = NUM_TOKENS) -> Outcome:
    begun = time.monotonic()
    body = {"prompt": [60] * 20, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    answer = await post(port, TEXT, body)
    try:
        status_s = first_s = time.monotonic() - begun
        if answer.status == 200:
            events = answer.events()
            await anext(events)
            first_s = time.monotonic() - begun
            last = [event async for event in events][-1]
            assert last == b"[DONE]", last
        return Outcome(answer.status, answer.headers.get("retry-after"), status_s, first_s)
    finally:
        answer.cut()


if __name__ == "__main__":
    sys.exit(main())
