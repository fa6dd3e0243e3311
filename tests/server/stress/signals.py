"""SIGKILL, SIGTERM and SIGSTOP under load, again and again.

kill    every client sees an error at once, nothing is left (child, socket, /dev/shm), a new server serves
term    what is in flight finishes, new requests get 503, exit code 0
stop    after so many seconds of SIGSTOP and a SIGCONT: no wrong token, and /health is 200

python tests/server/stress/signals.py [--times 20] [--stops 1] [--stopped-s 10] [--save MACHINE]
"""

import asyncio
import json
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from server_process import ServerProcess, wait_for
from stream_client import TEXT, post
from stress_report import make_parser, report
from support.common import table

NUM_STREAMS, NUM_TOKENS = 12, 200
# A killed server's clients must know within this time.
NOTICED_S = 2.0
OPTIONS = ("--shutdown-timeout", "60")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--stops", type=int, default=1)
    parser.add_argument("--stopped-s", type=float, default=10.0)
    arguments = parser.parse_args()
    rows, failures, longest_s = [], [], 0.0
    for name, act, times in (
        ("kill -9", killed, arguments.times),
        ("SIGTERM", terminated, arguments.times),
        ("SIGSTOP", lambda: stopped_fresh(arguments.stopped_s), arguments.stops),
    ):
        found = [act() for _ in range(times)]
        problems = [f"{name}: {text}" for one in found for text in one["failures"]]
        longest_s = max((one["seconds"] for one in found), default=0.0)
        good = sum(not one["failures"] for one in found)
        rows.append([name, f"{good}/{times}", f"{longest_s:.2f}"])
        failures += problems
    print(table(["signal under load", "good", "longest: all clients knew, exit, well again (s)"], rows))
    figures = {"rows": rows, "streams": NUM_STREAMS, "failures": failures}
    return report("signals", figures, arguments)


def killed() -> dict[str, Any]:
    """Kill a server under load; return the seconds until the last client knew, and failures."""
    failures: list[str] = []
    with ServerProcess(*OPTIONS) as server:
        children: list[int] = []

        def kill() -> None:
            children.extend(server.children())
            if "/dev/shm/" in Path(f"/proc/{server.pid}/maps").read_text():
                failures.append("it maps a file of /dev/shm, which would be left")
            server.send_signal(signal.SIGKILL)

        ends, seconds = asyncio.run(_under_load(server, kill))
        failures += [f"a client saw {end!r} instead of an error" for end in ends if end != "error"]
        server.process.wait()
        if not wait_for(lambda: not any(_is_alive(pid) for pid in children), 5):
            failures.append("a child is left")
        if _listens(server.port):
            failures.append("somebody still listens")
    if seconds > NOTICED_S:
        failures.append(f"a client waited {seconds:.1f} s")
    return {"seconds": seconds, "failures": failures}


def terminated() -> dict[str, Any]:
    """Let a server under load end; return the seconds until it had, and failures."""
    failures: list[str] = []
    with ServerProcess(*OPTIONS) as server:
        statuses: list[int] = []

        def end() -> None:
            server.send_signal(signal.SIGTERM)
            wait_for(lambda: _status(f"{server.url}/ready") == 503, 5)
            statuses.append(_status(server.url + TEXT, {"prompt": "Hi"}))

        ends, seconds = asyncio.run(_under_load(server, end))
        failures += [f"a stream ended with {end!r}" for end in ends if end != "length"]
        if statuses != [503]:
            failures.append(f"a new request got {statuses}")
        code = server.process.wait(60)
        if code != 0 or server.errors():
            failures.append(f"exit code {code}, {server.errors()[:300]!r}")
    return {"seconds": seconds, "failures": failures}


def stopped_fresh(seconds: float) -> dict[str, Any]:
    """As `stopped`, with a server of its own."""
    with ServerProcess(*OPTIONS) as server:
        return stopped(server, seconds)


def stopped(server: ServerProcess, seconds: float) -> dict[str, Any]:
    """Stop a server under load for a while; return the seconds until it was well again, and failures."""
    failures: list[str] = []
    undisturbed = asyncio.run(_all_tokens(server))
    was_silent: list[bool] = []

    def pause() -> None:
        server.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        was_silent.append(_status(f"{server.url}/health", timeout_s=0.2) == 0)
        server.send_signal(signal.SIGCONT)

    again = asyncio.run(_all_tokens(server, pause))
    begun = time.monotonic()
    if not wait_for(lambda: _status(f"{server.url}/health") == 200, 5):
        failures.append("/health is not 200 afterwards")
    wrong = [number for number in range(NUM_STREAMS) if undisturbed[number] != again[number]]
    if wrong:
        failures.append(f"streams {wrong} have other tokens")
    if was_silent != [True]:
        failures.append("it answered while it was stopped")
    if left := server.leftovers():
        failures.append(f"left: {left}")
    return {"seconds": time.monotonic() - begun, "failures": failures}


async def _under_load(server: ServerProcess, act: Any) -> tuple[list[str], float]:
    """Act while streams run; return how each ended, and the seconds from then to the last end."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    streams = [
        asyncio.create_task(_how_it_ends(server.port, number, event)) for number, event in enumerate(begun)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    since = time.monotonic()
    await asyncio.to_thread(act)
    return list(await asyncio.gather(*streams)), time.monotonic() - since


async def _how_it_ends(port: int, number: int, begun: asyncio.Event) -> str:
    answer = await post(port, TEXT, _body(number))
    finish = "nothing"
    try:
        async for event in answer.events():
            begun.set()
            if event == b"[DONE]":
                return finish
            found = json.loads(event)
            finish = "error event" if "error" in found else found["choices"][0]["finish_reason"] or finish
    except ConnectionError:
        return "error"
    finally:
        answer.cut()
    return f"{finish}, no [DONE]"


async def _all_tokens(server: ServerProcess, act: Any = None) -> list[list[int]]:
    """The tokens of all streams; act in the middle."""
    begun = asyncio.Event()

    async def tokens(number: int) -> list[int]:
        answer = await post(server.port, TEXT, _body(number) | {"return_token_ids": True})
        found: list[int] = []
        async for event in answer.events():
            begun.set()
            if event != b"[DONE]":
                found += json.loads(event)["choices"][0]["token_ids"]
        answer.cut()
        return found

    streams = [asyncio.create_task(tokens(number)) for number in range(NUM_STREAMS)]
    await begun.wait()
    if act is not None:
        await asyncio.to_thread(act)
    return list(await asyncio.gather(*streams))


def _body(number: int) -> dict[str, Any]:
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number, "stream": True}
    return {"prompt": f"stream {number}", **fields}


def _status(url: str, body: dict[str, Any] | None = None, timeout_s: float = 10.0) -> int:
    """Return an answer's status; 0 if there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _listens(port: int) -> bool:
    return any(
        line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
    )


if __name__ == "__main__":
    sys.exit(main())
