"""Hostile requests (tests/server/hostile/*.json): each gets a 4xx or a harmless 200 within 2 s.

Neighbours stream all the while; the requests come from another process, one right after the other. The
neighbours' inter-token p99 is compared with that of the same streams alone, before and after, and beside as
many plain requests: whoever sends without a pause takes a part of the interpreter's time, hostile or not.

    python tests/server/stress/hostile.py [--model smollm2] [--rounds 2] [--save MACHINE]
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from server_process import ROOT, ServerProcess
from stream_client import CHAT, TEXT, chat, exchange, post
from stress_report import make_parser, percentile, report
from support.common import table

CORPUS = ROOT / "tests" / "server" / "hostile"
# A grammar may compile for 2 s; the rest is the way there and back.
LIMIT_S, MAX_GROWTH_MB, MAX_RATIO = 2.5, 100.0, 1.2
NUM_NEIGHBOURS = 2

Prepared = tuple[str, str, bytes]
"""A request's kind and name, and what is sent."""
Outcome = tuple[str, str, int, float]
"""Kind, name, status and seconds."""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="default: the tiny model")
    parser.add_argument("--control-s", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with ServerProcess("--num-blocks", "1024", model=arguments.model) as server:
        figures = asyncio.run(measure(server, arguments.control_s, arguments.rounds))
    print(table(["kind", "inputs", "statuses", "longest s"], figures["rows"]))
    return report("hostile", {"model": arguments.model or "tiny", **figures}, arguments)


def corpus() -> list[tuple[str, dict[str, Any]]]:
    """All inputs as (kind, input); kinds are the files' names."""
    found = []
    for file in sorted(CORPUS.glob("*.json")):
        found += [(file.stem, one) for one in json.loads(file.read_text())]
    return found


async def measure(server: ServerProcess, control_s: float, num_rounds: int) -> dict[str, Any]:
    """Send the corpus beside neighbours; return times, the neighbours' gaps and failures."""
    neighbours, events = Neighbours(server.port), asyncio.get_running_loop()
    outcomes: list[Outcome] = []
    gaps: dict[str, list[float]] = {}
    rss: list[int] = []
    hostile = [(kind, one["name"], raw_request(one)) for kind, one in corpus()]
    plain = [("plain", "", raw_request({"fields": {}}))] * len(hostile) * num_rounds
    with ProcessPoolExecutor(1, get_context("spawn")) as other:

        async def send_from_there(requests: Sequence[Prepared]) -> None:
            outcomes.extend(await events.run_in_executor(other, send_all, server.port, requests))
            rss.append(server.rss_bytes())

        async def attack() -> None:
            # The first round fills caches, the last shows what stays.
            for _ in range(num_rounds):
                await send_from_there(hostile)

        gaps["before"] = await neighbours.during(asyncio.sleep(control_s))
        gaps["beside_plain"] = await neighbours.during(send_from_there(plain))
        gaps["beside"] = await neighbours.during(attack())
        gaps["after"] = await neighbours.during(asyncio.sleep(control_s))
    growth_mb = (rss[-1] - rss[-2]) / 1e6
    failures = broken(outcomes) + neighbours.failures
    failures += [f"left: {left}" for left in [server.leftovers()] if left]
    if growth_mb > MAX_GROWTH_MB:
        failures.append(f"memory grew by {growth_mb:.0f} MB in the last round")
    return {
        "inputs": len(hostile) * num_rounds,
        "longest_s": max(seconds for *_, seconds in outcomes),
        **_compared(gaps),
        "rss_growth_first_mb": (rss[1] - rss[0]) / 1e6,
        "rss_growth_last_mb": growth_mb,
        "rows": _by_kind(outcomes),
        "failures": failures,
    }


def _compared(gaps: dict[str, list[float]]) -> dict[str, Any]:
    """Return seconds between tokens in ms, and how many times longer they are beside hostile requests."""
    alone = gaps["before"] + gaps["after"]
    p99 = {when: percentile(found, 99) * 1e3 for when, found in {**gaps, "alone": alone}.items()}
    ratio = p99["beside"] / p99["alone"]
    return {
        "itl_p50_alone_ms": percentile(alone, 50) * 1e3,
        "itl_p50_beside_ms": percentile(gaps["beside"], 50) * 1e3,
        **{f"itl_p99_{when}_ms": found for when, found in p99.items()},
        "itl_max_beside_ms": max(gaps["beside"]) * 1e3,
        "itl_p99_ratio": ratio,
        "itl_p99_ratio_to_plain": p99["beside"] / p99["beside_plain"],
        "itl_p99_ratio_is_kept": ratio < MAX_RATIO,
    }


def send_all(port: int, requests: Sequence[Prepared]) -> list[Outcome]:
    """Send requests one after the other; return what came of each."""

    async def outcomes() -> list[Outcome]:
        return [(kind, name, *await send(port, data)) for kind, name, data in requests]

    return asyncio.run(outcomes())


async def send(port: int, data: bytes) -> tuple[int, float]:
    """Send a request; return (status, seconds). A connection that is closed without an answer is status 0."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(5 * LIMIT_S):
            answer = await exchange(port, data)
            try:
                await answer.body()
            finally:
                answer.cut()
        return answer.status, time.monotonic() - begun
    except ConnectionError:
        return 0, time.monotonic() - begun
    except TimeoutError:
        return -1, time.monotonic() - begun


def raw_request(one: dict[str, Any]) -> bytes:
    """Return the bytes of an input.

    Its body is `text` as it is, `body` as JSON, or a chat of one message with `fields`. `headers` are
    added to the usual ones; null takes one away.
    """
    if "text" in one:
        text = unfold(one["text"])
    else:
        body = one["body"] if "body" in one else chat("Hi", max_tokens=4) | one["fields"]
        text = json.dumps(unfold(body))
    data = text.encode("utf-8", "surrogatepass")
    headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(data))}
    headers |= {name: unfold(value) for name, value in one.get("headers", {}).items()}
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if value is not None]
    path = unfold(one.get("path", CHAT))
    head = f"{one.get('method', 'POST')} {path} HTTP/1.1\r\n{''.join(lines)}\r\n"
    return head.encode("latin-1") + data


def unfold(value: Any) -> Any:
    """Write out what the corpus abbreviates.

    {"repeat": [TEXT, N]} is a text N times, {"listed": [TEXT, N]} a list of N texts with their numbers in
    place of #, {"nested": [OPEN, INNER, CLOSE, N]} a nest as text, {"nested_json": ...} the same as JSON.
    """
    if isinstance(value, list):
        return [unfold(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"repeat"}:
        text, times = value["repeat"]
        return text * times
    if value.keys() == {"nested"}:
        opening, inner, closing, times = value["nested"]
        return opening * times + inner + closing * times
    if value.keys() == {"nested_json"}:
        return json.loads(unfold({"nested": value["nested_json"]}))
    if value.keys() == {"listed"}:
        text, times = value["listed"]
        return [text.replace("#", str(number)) for number in range(times)]
    return {key: unfold(item) for key, item in value.items()}


def broken(outcomes: Sequence[Outcome], limit_s: float = LIMIT_S) -> list[str]:
    """Return what is wrong."""
    failures = []
    for kind, name, status, seconds in outcomes:
        is_refused = 400 <= status < 500 or (status == 0 and kind == "headers")
        if not (is_refused or status == 200) or seconds > limit_s:
            failures.append(f"{kind}, {name}: status {status} after {seconds:.2f} s")
    return failures


def _by_kind(outcomes: Sequence[Outcome]) -> list[list[object]]:
    rows: list[list[object]] = []
    for kind in sorted({kind for kind, *_ in outcomes}):
        of_kind = [(status, seconds) for found, _, status, seconds in outcomes if found == kind]
        statuses = sorted({status for status, _ in of_kind})
        counts = ", ".join(f"{sum(one == status for one, _ in of_kind)}x {status}" for status in statuses)
        rows.append([kind, len(of_kind), counts, f"{max(seconds for _, seconds in of_kind):.2f}"])
    return rows


class Neighbours:
    """Streams that begin again whenever they end, and how long their tokens took."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.failures: list[str] = []

    async def during(self, work: Awaitable[Any]) -> list[float]:
        """Stream while something is done; return the seconds between tokens."""
        gaps: list[float] = []
        streams = [asyncio.create_task(self._stream(gaps)) for _ in range(NUM_NEIGHBOURS)]
        await work
        for stream in streams:
            stream.cancel()
        for found in await asyncio.gather(*streams, return_exceptions=True):
            if not isinstance(found, asyncio.CancelledError):
                self.failures.append(f"a neighbour ended: {found!r}")
        return gaps

    async def _stream(self, gaps: list[float]) -> None:
        body = {"prompt": [60] * 8, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        while True:
            answer = await post(self._port, TEXT, body)
            try:
                before = 0.0
                async for event in answer.events():
                    assert b'"error"' not in event, event
                    now = time.monotonic()
                    gaps.extend([now - before] if before else [])
                    before = now
            finally:
                answer.cut()


if __name__ == "__main__":
    sys.exit(main())
