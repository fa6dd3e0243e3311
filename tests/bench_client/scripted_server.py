"""A server with OpenAI's API that answers by a script, in a thread of this process."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

Fields = dict[str, Any]


class Script:
    """How to answer; tests change it.

    Attributes:
        asked: bodies of all requests, with their Authorization headers under "key".
        status: of every answer.
        refusal: the body of an answer that is no success.
        texts: what the events of one answer say.
        gap_s: before each of them.
        usage: of one answer; None: the server tells none.
        tail: sent at the end, in place of [DONE].
    """

    def __init__(self) -> None:
        self.asked: list[Fields] = []
        self.status = 200
        self.refusal: bytes | Callable[[int], bytes] = b"{}"
        self.texts = ["a", "b", "", "c"]
        self.gap_s = 0.0
        self.usage: Fields | None = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
        self.tail = b"data: [DONE]\n\n"
        self.num_under_way = self.most_under_way = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append({**body, "key": request.headers.get("Authorization")})
        if self.status != 200:
            text = self.refusal if isinstance(self.refusal, bytes) else self.refusal(len(self.asked))
            return web.Response(status=self.status, body=text)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": a comment\r\n\r\n")
        for event in self._events("messages" in body):
            await asyncio.sleep(self.gap_s)
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            # Events need not come in one piece each.
            await response.write(data[:9])
            await response.write(data[9:])
        self.num_under_way -= 1
        await response.write(self.tail)
        return response

    def _events(self, is_chat: bool) -> list[Fields]:
        ends = [None] * (len(self.texts) - 1) + ["length"]
        choices = [
            {
                "index": 0,
                "finish_reason": end,
                **({"delta": {"content": text}} if is_chat else {"text": text}),
            }
            for text, end in zip(self.texts, ends, strict=True)
        ]
        events: list[Fields] = [{"choices": [choice]} for choice in choices]
        if is_chat:
            events.insert(0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        return events if self.usage is None else [*events, {"choices": [], "usage": self.usage}]


class ScriptedServer:
    """Serves until `close`."""

    def __init__(self) -> None:
        self.script = Script()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._started.wait(10)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self.script.answer)
        app.router.add_post("/v1/chat/completions", self.script.answer)
        app.router.add_get("/v1/models", _models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self._loop, self._left = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._left.wait()
        await runner.cleanup()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._left.set)
        self._thread.join(10)


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "scripted"}, {"id": "other"}]})
