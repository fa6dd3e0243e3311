"""A server on loopback in this process, and short ways to talk to it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from octavo.engine.engine import Engine
from octavo.server.app import make_app
from octavo.server.config import ServerConfig
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.serving import make_server

# `octavo`, whose engine takes its time while a file named "slow" exists in its folder, and dies of one named
# "kill": a test that looks late finds what it began still under way.
PROGRAM = """
import sys, time
from pathlib import Path
import octavo.cli.serve as cli

serve = cli._serve

def serve_paced(*arguments, **options):
    from octavo.engine.engine import Engine

    step = Engine.step

    def paced(self):
        if Path("kill").exists():
            Path("kill").unlink()
            raise SystemExit("device gone")
        if Path("slow").exists():
            time.sleep(0.05)
        step(self)

    Engine.step = paced
    serve(*arguments, **options)

cli._serve = serve_paced
from octavo.cli import main
main(sys.argv[1:])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LiveServer:
    """Serves an engine over HTTP from a thread of its own, until `close`."""

    def __init__(self, make_engine: Callable[[], Engine], model: str, **options: Any) -> None:
        self.config = ServerConfig(port=free_port(), **options)
        self.url = f"http://127.0.0.1:{self.config.port}"
        self.loop = EngineLoop(
            make_engine,
            max_waiting=self.config.max_num_queued_reqs,
            max_waiting_tokens=self.config.max_num_queued_tokens,
            step_deadline_s=self.config.step_deadline_s,
        )
        self.gate = make_app(self.loop, self.config, model)
        self.http = httpx.Client(base_url=self.url, timeout=60.0)
        self._server: Any = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._await_port()
        self.loop.start()

    def _run(self) -> None:
        async def serve() -> None:
            self._events = asyncio.get_running_loop()
            self._server = make_server(self.gate, self.config)
            await self._server.serve()

        asyncio.run(serve())

    def _await_port(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.config.port)) == 0:
                    return
            time.sleep(0.01)
        raise AssertionError("the server does not listen")

    def wait_until_ready(self) -> "LiveServer":
        eventually(lambda: self.loop.state == "ready", 60)
        return self

    def on_events(self, work: Callable[[], Any]) -> Any:
        """Run a coroutine on the server's event loop."""
        assert self._events is not None
        return asyncio.run_coroutine_threadsafe(work(), self._events).result(60)

    def post(self, path: str, body: Any, **keywords: Any) -> httpx.Response:
        return self.http.post(path, json=body, **keywords)

    def events(self, path: str, body: dict, **keywords: Any) -> list[dict]:
        """Return the events of a stream, which must end with [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}, **keywords) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]

    def assert_drained(self) -> None:
        """No request is left anywhere, and every block is free."""
        # A client that left at once may have a request that is still on its way to the engine.
        eventually(self._is_drained)
        assert self.loop.stats().num_waiting == self.loop.stats().num_waiting_tokens == 0
        self.on_events(lambda: self.loop.call(lambda engine: engine.manager.check_invariants()))

    def _is_drained(self) -> bool:
        stats = self.on_events(lambda: self.loop.call(lambda engine: engine.stats()))
        in_engine = (stats.num_running, stats.num_waiting, stats.kv.num_referenced)
        return self.loop.stats().num_live == 0 and in_engine == (0, 0, 0)

    def close(self) -> None:
        self.http.close()
        self.loop.stop()
        if self._events is not None and self._server is not None:
            self._events.call_soon_threadsafe(self._server.stop)
        self._thread.join(10)
        self.gate.context.close()


def slow(server: LiveServer, step_s: float = 0.05) -> None:
    """Make every step take at least so long: who looks late finds requests still under way."""
    engine = server.loop.engine
    step = engine.step

    def slow_step() -> None:
        time.sleep(step_s)
        step()

    engine.step = slow_step  # type: ignore[method-assign]


def start_process(arguments: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start PROGRAM of this checkout in a folder."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
    )


def eventually(condition: Callable[[], bool], seconds: float = 60.0, every_s: float = 0.005) -> None:
    """Wait until something is true; looks that take long should be rare, as they slow what they wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(every_s)


def answers(url: str, status: int) -> bool:
    """Whether a GET is answered with a status; loading certificates would take 30 ms for each look."""
    try:
        return httpx.get(url, timeout=30, verify=False).status_code == status
    except httpx.TransportError:
        return False


def chat(text: str, **fields: Any) -> dict:
    """A chat of one message, greedy and short unless told otherwise."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8, **fields}


def raw(server: LiveServer, data: bytes, timeout: float = 5.0) -> bytes:
    """Send bytes as they are; return all that comes back until the server closes or is silent."""
    with socket.create_connection(("127.0.0.1", server.config.port), timeout=timeout) as connection:
        connection.sendall(data)
        return b"".join(_received(connection))


def _received(connection: socket.socket) -> Iterator[bytes]:
    try:
        while piece := connection.recv(65536):
            yield piece
            connection.settimeout(0.5)
    except (TimeoutError, ConnectionResetError):
        return
