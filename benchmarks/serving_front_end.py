"""CPU time of all that stands between an engine and a client, per streamed token.

A stand-in engine writes one token and one word to every request per step; everything else is the server's:
the engine's thread, its streams, the events of /v1/chat/completions and /v1/completions, granian, sockets. A
client in another process reads, and its CPU time is counted apart. The server's is that of the whole process,
threads in Rust included, less what the stand-in takes by itself. What a request costs is measured with
streams of one token, and taken off. Of several runs the one that took least counts, since neighbours on the
machine only add.

    python benchmarks/serving_front_end.py [--streams 64 256] [--tokens 400] [--step-ms 2 20] [--runs 3]
                                           [--ids 16 4200] [--save MACHINE]

A short step makes a server that falls behind gather tokens: an event then holds several. us_per_event is
the honest price, us_per_token what a loaded server pays. us_per_event_kernel is the part in system mode,
which no server can avoid as long as every event is a write to a socket; us_per_write is what the same writes
cost a program that does nothing else. "one thread" is the way from a token to the HTTP server, without
sockets and threads. The second table has requests: streams of one token, all at once, by the length of their
prompts, and the CPU time of each kind of thread (Linux only). The last line is JSON.
"""

import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from support.bare_writes import cpu_s_of_writes
from support.common import make_parser, publish, table
from support.event_path import seconds_per_event
from support.fake_engine import FakeEngine, cpu_s_alone

from octavo.config import DEFAULT_MODEL
from octavo.engine.engine import Engine
from octavo.models import load_tokenizer, resolve_model
from octavo.server.app import make_app
from octavo.server.config import ServerConfig
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.serving import make_server

Figures = dict[str, Any]
PATHS = ("/v1/chat/completions", "/v1/completions")


class FrontEnd:
    """A server of a stand-in engine, in a thread of this process."""

    def __init__(self, step_s: float) -> None:
        tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL))
        self.port = _free_port()
        self._config = ServerConfig(port=self.port)
        self._loop = EngineLoop(lambda: cast(Engine, FakeEngine(step_s, tokenizer)))
        self._gate = make_app(self._loop, self._config, "stand-in")
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="event loop")
        self._ready = threading.Event()

    async def _serve(self) -> None:
        self._events = asyncio.get_running_loop()
        self._server = make_server(self._gate, self._config)
        self._loop.start()
        await self._loop.wait_until_ready()
        self._events.call_later(0.5, self._ready.set)
        await self._server.serve()

    def __enter__(self) -> "FrontEnd":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.stop()
        self._events.call_soon_threadsafe(self._server.stop)
        self._thread.join()
        self._gate.context.close()

    def run(self, path: str, num_streams: int, num_tokens: int, num_ids: int = 1) -> "Run":
        """Serve so many streams side by side."""
        numbers = (self.port, path, num_streams, num_tokens, num_ids)
        command = [sys.executable, "-m", "support.stream_reader", *map(str, numbers)]
        threads = _cpu_of_threads()
        own, child, begun = _cpu(resource.RUSAGE_SELF), _cpu(resource.RUSAGE_CHILDREN), time.perf_counter()
        read = subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parent)
        own_after, child_after = _cpu(resource.RUSAGE_SELF), _cpu(resource.RUSAGE_CHILDREN)
        counted = json.loads(read.stdout)
        assert counted["ended"] == num_streams
        return Run(
            cpu_s=sum(own_after) - sum(own),
            system_s=own_after[1] - own[1],
            client_s=sum(child_after) - sum(child),
            seconds=time.perf_counter() - begun,
            num_events=counted["events"],
            num_bytes=counted["bytes"],
            begun_s=counted["begun_s"],
            thread_s={name: cpu_s - threads.get(name, 0.0) for name, cpu_s in _cpu_of_threads().items()},
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What one run took.

    Attributes:
        cpu_s: of the server's process.
        system_s: the part of it in system mode.
        client_s: of the client's process, its start included.
        seconds: by the clock.
        num_events: that the client read, [DONE] included.
        num_bytes: of all answers.
        begun_s: from the first request to the last one's first event.
        thread_s: CPU time by the names of threads; those of the HTTP server have none here.
    """

    cpu_s: float
    system_s: float
    client_s: float
    seconds: float
    num_events: int
    num_bytes: int
    begun_s: float
    thread_s: dict[str, float]


def _cpu_of_threads() -> dict[str, float]:
    names = {thread.native_id: thread.name.partition("_")[0] for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").glob("*"):
        name = names.get(int(task.name), "HTTP server")
        found[name] = found.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def _cpu(who: int) -> tuple[float, float]:
    used = resource.getrusage(who)
    return used.ru_utime, used.ru_stime


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, nargs="*", default=[2.0, 20.0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ids", type=int, nargs="*", default=[16, 4200], help="of prompts, for requests")
    arguments = parser.parse_args()
    rows: list[Figures] = []
    requests: list[Figures] = []
    for step_ms in arguments.step_ms:
        with FrontEnd(step_ms / 1000) as server:
            for path in PATHS:
                for num_streams in arguments.streams:
                    rows.append(measure(server, path, num_streams, arguments.tokens, step_ms, arguments.runs))
                    print(rows[-1], file=sys.stderr, flush=True)
    if arguments.ids:
        with FrontEnd(0.005) as server:
            num = max(arguments.streams)
            requests += [of_requests(server, PATHS[1], num, ids, arguments.runs) for ids in arguments.ids]
            requests.append(of_requests(server, PATHS[0], num, 1, arguments.runs))
    alone = seconds_per_event(max(arguments.streams), 200)
    one_thread = {
        "us_per_event_one_thread_least": min(alone) * 1e6,
        "us_per_event_one_thread_median": statistics.median(alone) * 1e6,
    }
    print(one_thread)
    for found in filter(None, (rows, requests)):
        print(table(list(found[0]), [[_short(value) for value in row.values()] for row in found]))
    figures = {"runs": arguments.runs, **one_thread, "rows": rows, "requests": requests}
    publish("serving_front_end", figures, arguments)


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def of_requests(server: FrontEnd, path: str, num: int, num_ids: int, runs: int) -> Figures:
    """Figures of so many requests at once: microseconds of CPU for each, of all threads and of some."""
    server.run(path, num, 1, num_ids)
    least = min((server.run(path, num, 1, num_ids) for _ in range(runs)), key=lambda run: run.cpu_s)
    names = ("event loop", "octavo-read", "octavo-engine", "HTTP server")
    return {
        "path": path,
        "ids": num_ids,
        "requests": num,
        "us_per_request": least.cpu_s / num * 1e6,
        **{f"us {name}": least.thread_s.get(name, 0.0) / num * 1e6 for name in names},
        "ms to the last first event": least.begun_s * 1e3,
    }


def measure(
    server: FrontEnd, path: str, num_streams: int, num_tokens: int, step_ms: float, runs: int
) -> Figures:
    """Figures of one way to stream: microseconds are of CPU, per streamed token, event and request."""
    server.run(path, num_streams, 2)
    short = min((server.run(path, num_streams, 1) for _ in range(runs)), key=lambda run: run.cpu_s)
    long = min((server.run(path, num_streams, num_tokens) for _ in range(runs)), key=lambda run: run.cpu_s)
    engine_s = min(cpu_s_alone(num_streams, num_tokens, step_ms / 1000) for _ in range(runs))
    own_s = long.cpu_s - short.cpu_s - engine_s
    # The first event of a chat is its role; [DONE] is none.
    num_events = long.num_events - num_streams * (3 if path == PATHS[0] else 2)
    event_bytes = (long.num_bytes - short.num_bytes) // num_events
    num_each = min(num_events // num_streams, 200)
    write_s = min(cpu_s_of_writes(num_streams, num_each, event_bytes, step_ms / 1000) for _ in range(runs))
    total = num_streams * (num_tokens - 1)
    return {
        "path": path,
        "step_ms": step_ms,
        "streams": num_streams,
        "tokens_per_event": total / num_events,
        "us_per_token": own_s / total * 1e6,
        "us_per_event": own_s / num_events * 1e6,
        "us_per_event_kernel": (long.system_s - short.system_s) / num_events * 1e6,
        "us_per_write": write_s / (num_streams * num_each) * 1e6,
        "events_per_s_and_core": num_events / own_s,
        "us_per_request": short.cpu_s / num_streams * 1e6,
        "us_per_token_engine_alone": engine_s / total * 1e6,
        "us_per_event_client": (long.client_s - short.client_s) / num_events * 1e6,
        "seconds": long.seconds,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
