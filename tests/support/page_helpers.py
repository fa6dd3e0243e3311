"""A server with the page and an engine at work, and a tab of a browser that looks at it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator

from granian.constants import Interfaces
from granian.log import LogLevels
from granian.server.embed import Server
from loop_helpers import pace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from octavo import SamplingParams
from octavo.engine.engine import Engine
from octavo.server.live.routes import page_routes
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.loop.output_stream import Stream

ANSWER = (
    "## Two *kinds*\n\nA **block** holds `16` tokens.\n\n- free\n- cached\n\n```python\nprint('<b>')\n```\n"
    "See [this](https://example.org/a) or [that](javascript:alert(1)).\n\n"
    "<img src=x onerror=\"document.title='broken'\"> <script>document.title='broken'</script>"
)
SLOW, HARD, EACH = "slow", "hard", "each"
REFUSED = {"fail": (400, None), "too many": (400, "max_tokens"), "no key": (401, None)}
# What is too wide in every way: words, lines of code, tables, addresses, quotes, lists.
WIDE = (
    f"# {'Heading' * 40}\n\n{'word' * 150}\n\n```\n{'a long line of code ' * 30}\n```\n\n"
    f"| {' | '.join(f'column {index}' for index in range(14))} |\n|{'---|' * 14}\n"
    f"| {' | '.join('x' * 60 for _ in range(14))} |\n\n- `{'inline_code' * 30}`\n- {'item' * 60}\n\n"
    f"> {'quoted' * 60}\n\n[{'link' * 40}](https://example.org/{'path/' * 60})"
)
SYSTEM = list(range(10, 26))


class Page:
    """A server with the page, an engine at work, and an API that says what it is told to.

    Attributes:
        url: where it is.
        bodies: of the requests to /v1/chat/completions.
        num_left: clients that left in the middle of an answer.
    """

    def __init__(self, loop: EngineLoop) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.bodies: list[dict] = []
        self.num_left = 0
        self._loop = loop
        self._events = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        self._events.call_soon_threadsafe(self._leave.set)
        self._thread.join(20)
        self._events.close()

    def _run(self) -> None:
        self._events.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._leave = asyncio.Event()
        await self._loop.wait_until_ready()
        streams = [await self._submit(number) for number in range(4)]
        while self._loop.stats().num_waiting:
            await asyncio.sleep(0.01)
        routes = [
            *page_routes(self._loop),
            Route("/v1/models", _models),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]
        server = Server(
            Starlette(routes=routes),
            address="127.0.0.1",
            port=self.port,
            interface=Interfaces.ASGINL,
            websockets=False,
            log_level=LogLevels.error,
        )
        serving = asyncio.ensure_future(server.serve())
        while not _listens(self.port):
            await asyncio.sleep(0.02)
        self._ready.set()
        await self._leave.wait()
        for stream in streams:
            stream.abort()
        server.stop()
        # It would wait for browsers to close their connections.
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def _submit(self, number: int) -> Stream:
        params = SamplingParams(n=2, temperature=1.0, seed=number, max_tokens=400, ignore_eos=True)
        return await self._loop.submit([*SYSTEM, 40 + number], params, request_id=str(number))

    async def _complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        if (asked := body["messages"][-1]["content"]) in REFUSED:
            status, param = REFUSED[asked]
            error = {"message": "temperature must be <b>lower</b>", "param": param}
            return JSONResponse({"error": error}, status)
        return StreamingResponse(self._chunks(body), media_type="text/event-stream")

    async def _chunks(self, body: dict) -> AsyncIterator[str]:
        asked = body["messages"][-1]["content"]
        is_slow = asked == SLOW
        text = {SLOW: "word " * 10_000, HARD: WIDE, EACH: "one #"}.get(asked, ANSWER)
        is_whole = False
        try:
            for start in range(0, len(text), 5):
                for index in range(body["n"]):
                    piece = text[start : start + 5].replace("one #", f"number {index + 1}")
                    delta = {"index": index, "delta": {"content": piece}}
                    yield f"data: {json.dumps({'choices': [delta]})}\n\n"
                await asyncio.sleep(0.005 if is_slow else 0.001)
            usage = {"prompt_tokens": 32, "completion_tokens": 50, "total_tokens": 82}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
            is_whole = True
        finally:
            # Whoever left ends this where it waits: within it, or where its last event is sent.
            self.num_left += not is_whole


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(page: object, condition: str) -> None:
    """Wait until something is true in a page; its policy lets the browser's own waits not look twice."""
    deadline = time.monotonic() + 60
    while not page.evaluate(condition):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, condition
        time.sleep(0.03)


def slow(engine: Engine) -> Engine:
    """Ten steps a second: a browser that starts slowly still finds eight sequences that fit the pool."""
    pace(engine, 0.1)
    return engine


class Tab:
    """A page in the browser that notes what goes wrong in it, and what it asks of others."""

    def __init__(self, browser: object, server: Page, **options: object) -> None:
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.context = browser.new_context(**options)  # type: ignore[attr-defined]
        self.page = page = self.context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("request", lambda request: self._note(request.url, server.url))
        page.goto(server.url)
        until(page, "document.getElementById('state').textContent === 'ready'")
        until(page, "document.getElementById('requests').rows.length === 8")

    def _note(self, url: str, ours: str) -> None:
        if not url.startswith(ours):
            self.elsewhere.append(url)

    def colours(self, canvas: str) -> int:
        """How many colours a canvas shows."""
        return self.page.evaluate(
            """id => {
                const canvas = document.getElementById(id);
                const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                const found = new Set();
                for (let at = 0; at < data.length; at += 4)
                    if (data[at + 3] === 255) found.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
                return found.size;
            }""",
            canvas,
        )

    def close(self) -> None:
        self.context.close()
