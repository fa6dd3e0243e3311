"""From a token in an output to the HTTP server, without sockets and threads: what Python alone costs."""

import asyncio
import time
from typing import Any

import msgspec

from octavo.server.api.chat import Answer, ChatEvents
from octavo.server.api.logprobs import LogprobWriter
from octavo.server.api.sse import EventStream
from octavo.server.api.structs import ChatRequest
from octavo.server.api.tools.toolbox import Toolbox
from octavo.server.generation import Generation
from octavo.server.loop.jobs import Job
from octavo.server.loop.output_stream import Readers, Stream
from octavo.server.loop.stats import Histogram
from octavo.server.parsing.formats import ModelFormats
from support.fake_engine import FakeEngine, plain_params, short_prompt


def seconds_per_event(num_streams: int, num_tokens: int) -> list[float]:
    """Seconds of CPU per event of so many chats, of each step in which all of them get a token."""
    return asyncio.run(_steps(num_streams, num_tokens))


async def _steps(num_streams: int, num_tokens: int) -> list[float]:
    engine, server = FakeEngine(0), _Server()
    readers = Readers(asyncio.get_running_loop(), Histogram(), Histogram())
    clients = [asyncio.ensure_future(_chat(engine, readers, server, num_tokens)) for _ in range(num_streams)]
    while engine.num_unfinished_requests < num_streams:
        await asyncio.sleep(0)
    seconds: list[float] = []
    while engine.has_unfinished_requests:
        engine.step()
        due = server.num_sent + num_streams
        begun = time.thread_time()
        readers.ring()
        while server.num_sent < due:
            await asyncio.sleep(0)
        seconds.append((time.thread_time() - begun) / num_streams)
    await asyncio.gather(*clients)
    # The first step writes roles too, and the last one ends streams.
    return seconds[1:-1]


async def _chat(engine: FakeEngine, readers: Readers, server: "_Server", num_tokens: int) -> None:
    name = str(engine.num_unfinished_requests)
    job = Job(name, None, short_prompt(), plain_params(num_tokens), "", 0, True, time.monotonic())
    job.output = engine.add_request(job.token_ids, job.params, request_id=name)
    generation = Generation([job.token_ids])
    generation.streams.append(Stream(job, readers, lambda _: None))
    asked = msgspec.convert({"messages": [{}]}, ChatRequest)
    answer = Answer(f"chatcmpl-{name:0>32}", 0, "stand-in", asked, LogprobWriter(None, 0))
    formats = ModelFormats(None, "", None, shows_tools=False)
    box = Toolbox((), (), frozenset(), must_call=False, parallel=False, formats=formats)
    events = ChatEvents(answer, generation, box, 1)
    await EventStream(events, generation, keep_alive_s=15, write_timeout_s=60)(
        {}, server.receive, server.send
    )


class _Server:
    """As much of an ASGI server as counts events and takes no time."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def send(self, message: Any) -> None:
        self.num_sent += message["type"] == "http.response.body"

    async def receive(self) -> Any:
        await asyncio.get_running_loop().create_future()
