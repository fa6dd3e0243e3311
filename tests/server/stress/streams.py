"""Many streams at once, of which a share is cut, given up or wrong: every other one ends properly.

Afterwards no request lives, every block is free and the server has as many files open as before.

    python tests/server/stress/streams.py [--streams 200] [--seconds 60] [--save MACHINE]
"""

import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

from server_process import ServerProcess, wait_for
from stream_client import CHAT, RESPONSES, TEXT, Answer, chat, post
from stress_report import make_parser, report

OPTIONS = ("--num-blocks", "600", "--max-num-seqs", "64", "--block-size", "4")
# Each is a tenth of all requests.
ROUGH = ("cuts at some event", "leaves before the answer", "is wrong")
SPARE_FILES = 2


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with ServerProcess(*OPTIONS) as server:
        figures = measure(server, arguments.streams, arguments.seconds)
    return report("streams", figures, arguments)


def measure(server: ServerProcess, num_streams: int, seconds: float) -> dict[str, Any]:
    """Run so many clients side by side for so long; return counts, what is left, and failures."""
    files_before = server.num_files()
    kinds, failures = asyncio.run(_all_clients(server.port, num_streams, seconds))
    left = server.leftovers()
    wait_for(lambda: server.num_files() <= files_before + SPARE_FILES, 15)
    files_after = server.num_files()
    failures += [f"{name} is {value:g} afterwards" for name, value in left.items()]
    if files_after > files_before + SPARE_FILES:
        failures.append(f"{files_after} files are open, {files_before} were before")
    if server.process.poll() is not None:
        failures.append("the server has ended")
    counts = {f"num_{kind.replace(' ', '_')}": count for kind, count in sorted(kinds.items())}
    return {
        "streams": num_streams,
        "seconds": seconds,
        "requests": kinds.total(),
        **counts,
        "files_before": files_before,
        "files_after": files_after,
        "blocks_left": left.get("octavo:kv_blocks_referenced", 0),
        "live_left": left.get("octavo:live_requests", 0),
        "failures": failures,
    }


async def _all_clients(port: int, num_streams: int, seconds: float) -> tuple[Counter[str], list[str]]:
    kinds: Counter[str] = Counter()
    failures: list[str] = []
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            kind = rng.choice(ROUGH) if rng.random() < 0.3 else "reads to the end"
            kinds[kind] += 1
            try:
                await _request(port, kind, rng)
            except (AssertionError, OSError, TimeoutError, ValueError) as error:
                failures.append(f"a client that {kind}: {error!r}")

    await asyncio.gather(*map(client, range(num_streams)))
    return kinds, failures


async def _request(port: int, kind: str, rng: random.Random) -> None:
    path, body = _random_body(rng)
    if kind == "is wrong":
        body[rng.choice(["top_p", "temperature"])] = rng.choice([-7, "hot", 1e9])
    if kind == "leaves before the answer":
        try:
            async with asyncio.timeout(rng.uniform(0, 0.05)):
                answer = await post(port, path, body)
        except TimeoutError:
            return
        return answer.cut()
    answer = await post(port, path, body)
    try:
        if kind == "is wrong":
            assert answer.status == 400, answer.status
        else:
            await _read(answer, rng.randrange(1, 8) if kind == "cuts at some event" else None)
    finally:
        answer.cut()


async def _read(answer: Answer, num_events: int | None) -> None:
    """Read a stream, to its end or only so many events."""
    if answer.status in (429, 503):
        assert "retry-after" in answer.headers
        return
    assert answer.status == 200, answer.status
    events: list[bytes] = []
    async for event in answer.events():
        events.append(event)
        if len(events) == num_events:
            return
    last = events[-2] if events[-1] == b"[DONE]" else events[-1]
    ended = (b'"finish_reason":"', b'"error":{', b'"response.completed"', b'"response.incomplete"')
    assert any(mark in last for mark in ended), last


def _random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A stream of 1 to 60 tokens, over any of the routes."""
    num_tokens, seed = rng.randrange(1, 60), rng.randrange(1000)
    text = rng.choice(["Hi", "a longer prompt " * 8, "日本 😀 " * 5, "shared " * 20 + str(seed)])
    path = rng.choice([CHAT, CHAT, TEXT, TEXT, RESPONSES])
    if path == RESPONSES:
        return path, {"input": text, "max_output_tokens": num_tokens, "stream": True}
    fields = {"max_tokens": num_tokens, "n": rng.choice([1, 1, 1, 2]), "seed": seed, "stream": True}
    if path == CHAT:
        return path, chat(text, **fields)
    return path, {"prompt": text, "ignore_eos": True, **fields}


if __name__ == "__main__":
    sys.exit(main())
