"""The page in a real browser: headless Chromium, without a network beyond this machine."""

import asyncio
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
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
from octavo.server.loop.stream import Stream

CHROMIUM = os.environ.get("OCTAVO_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason="Chromium is not installed (apt-get install chromium)"
)

ANSWER = (
    "## Two *kinds*\n\nA **block** holds `16` tokens.\n\n- free\n- cached\n\n```python\nprint('<b>')\n```\n"
    "See [this](https://example.org/a) or [that](javascript:alert(1)).\n\n"
    "<img src=x onerror=\"document.title='broken'\"> <script>document.title='broken'</script>"
)
SLOW = "slow"
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
        if body["messages"][-1]["content"] == "fail":
            return JSONResponse({"error": {"message": "temperature must be <b>lower</b>"}}, 400)
        return StreamingResponse(self._chunks(body), media_type="text/event-stream")

    async def _chunks(self, body: dict) -> AsyncIterator[str]:
        is_slow = body["messages"][-1]["content"] == SLOW
        text = "word " * 10_000 if is_slow else ANSWER
        is_whole = False
        try:
            for start in range(0, len(text), 5):
                for index in range(body["n"]):
                    delta = {"index": index, "delta": {"content": text[start : start + 5]}}
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


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def server(tiny_engine: Callable[..., Engine]) -> Iterator[Page]:
    loop = EngineLoop(lambda: slow(tiny_engine(num_blocks=512, max_num_seqs=16)))
    loop.start()
    page = Page(loop)
    yield page
    page.stop()
    loop.stop()


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


def test_the_engine_is_painted_and_explained(browser: object, server: Page) -> None:
    tab = Tab(browser, server, viewport={"width": 1280, "height": 900})
    page = tab.page
    assert page.title() == "Octavo"
    assert page.text_content("#model") == "tiny"
    # Seven colours of sequences at least, frames and free blocks.
    assert tab.colours("pool") >= 8
    assert tab.colours("tree") >= 2
    # The first block of the system prompt: one block, eight readers.
    box = page.locator("#pool").bounding_box()
    page.mouse.move(box["x"] + 6, box["y"] + 6)
    assert "one block with 8 readers" in page.text_content("#pool-words")
    assert page.locator("#requests tr.lit").count() == 8
    page.mouse.move(box["x"] + box["width"] - 6, box["y"] + 40)
    tree = page.locator("#tree").bounding_box()
    page.mouse.move(tree["x"] + 8, tree["y"] + 8)
    assert "read by 8 sequences now" in page.text_content("#tree-words")
    assert "Lookups found it 3 times" in page.text_content("#tree-words")
    assert "512 blocks of 4 tokens" in page.get_attribute("#pool", "aria-label")
    until(page, "parseFloat(document.getElementById('rate').textContent) > 0")
    assert (tab.errors, tab.elsewhere) == ([], [])
    tab.close()


def test_it_can_be_walked_by_keyboard(browser: object, server: Page) -> None:
    tab = Tab(browser, server)
    page = tab.page
    page.focus("#pool")
    assert page.text_content("#pool-words").startswith("Block 0 is one block with 8 readers")
    page.keyboard.press("ArrowRight")
    assert page.text_content("#pool-words").startswith("Block 1 ")
    page.keyboard.press("End")
    assert page.text_content("#pool-words").startswith("Block 511 is free")
    page.focus("#tree")
    assert "A beginning of prompts" in page.text_content("#tree-words")
    page.keyboard.press("ArrowDown")
    assert "A continuation" in page.text_content("#tree-words")
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, textarea, canvas[role=img], [role=region]")]
            .filter(element => !(element.ariaLabel || element.labels?.length || element.textContent.trim()))
            .map(element => element.outerHTML)"""
    )
    assert unnamed == []
    tab.close()


def test_nothing_overflows_on_a_phone_in_the_dark(browser: object, server: Page) -> None:
    tab = Tab(
        browser,
        server,
        color_scheme="dark",
        viewport={"width": 360, "height": 740},
        has_touch=True,
        is_mobile=True,
    )
    page = tab.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(16, 21, 27)"
    assert tab.colours("pool") >= 8
    page.locator("#pool").tap(position={"x": 6, "y": 6})
    assert "readers" in page.text_content("#pool-words")
    assert tab.errors == []
    tab.close()


def test_the_chat_streams_and_what_a_model_writes_stays_text(browser: object, server: Page) -> None:
    tab = Tab(browser, server)
    page = tab.page
    page.click("summary")
    page.fill("#n", "2")
    page.fill("#seed", "5")
    page.fill("#system", "Be brief.")
    page.fill("#prompt", "What is a block?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.meta')?.textContent.includes('50 written')")
    body = server.bodies[0]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a block?"},
    ]
    assert (body["model"], body["n"], body["seed"], body["stream"]) == ("tiny", 2, 5, True)
    answer = page.locator(".message.assistant > div:nth-child(4)")
    assert answer.locator("h4").inner_text() == "Two kinds"
    assert answer.locator("strong").inner_text() == "block"
    assert answer.locator("li").all_inner_texts() == ["free", "cached"]
    assert answer.locator("pre code").inner_text() == "print('<b>')"
    assert answer.locator("a").evaluate_all("links => links.map(link => link.href)") == [
        "https://example.org/a"
    ]
    assert "<img src=x onerror=" in answer.inner_text()
    assert page.locator(".message img, .message script").count() == 0
    assert page.title() == "Octavo"
    page.fill("#prompt", "And then?")
    page.click("#send")
    until(page, "document.querySelectorAll('.meta').length === 2")
    until(page, "!document.getElementById('send').disabled")
    assert [message["role"] for message in server.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert server.bodies[1]["messages"][2]["content"] == ANSWER
    assert (tab.errors, tab.elsewhere) == ([], [])
    tab.close()


def test_an_answer_can_be_stopped_and_an_error_is_told(browser: object, server: Page) -> None:
    tab = Tab(browser, server)
    page = tab.page
    page.fill("#prompt", SLOW)
    page.click("#send")
    until(page, "document.querySelector('.message.assistant').textContent.includes('word word')")
    assert page.is_disabled("#send")
    page.click("#stop")
    until(page, "document.querySelector('.meta').textContent.startsWith('stopped')")
    assert page.is_enabled("#send")
    deadline = time.monotonic() + 60
    while server.num_left == 0 and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert server.num_left == 1
    assert tab.errors == []
    page.fill("#prompt", "fail")
    page.click("#send")
    page.wait_for_selector(".message.error")
    assert page.text_content(".message.error") == "temperature must be <b>lower</b>"
    assert server.bodies[1]["messages"][0]["content"] == SLOW
    page.click("#clear")
    assert page.locator(".message").count() == 0
    tab.close()
