"""Streams without an engine, and a client that reads as long as it is told to."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from octavo import SamplingParams
from octavo.engine.prompt_reader import TokenIds
from octavo.outputs import CompletionDelta, CompletionOutput, RequestOutput
from octavo.server.api.sse import EventStream, EventWriter
from octavo.server.generation import Generation
from octavo.server.loop.jobs import Job
from octavo.server.loop.output_stream import Readers, Stream
from octavo.server.loop.stats import Histogram


class Words(EventWriter):
    """Writes each delta as its prompt's number and its text."""

    def begin(self) -> bytes:
        return b"begin "

    def write(self, position: int, deltas: list[CompletionDelta]) -> bytes:
        text = "".join(delta.text for delta in deltas)
        if "bad" in text:
            raise ValueError("it cannot be written")
        return f"{position}:{text} ".encode()

    def finish(self) -> bytes:
        return b"finish "


class Client:
    """A server's side of a connection whose client reads as long as it is `open`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()
        self.is_gone = asyncio.Event()
        self.fails = False

    async def send(self, message: Any) -> None:
        await self.open.wait()
        if self.fails:
            raise OSError("the connection is reset")
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])

    async def receive(self) -> Any:
        await self.is_gone.wait()
        return {"type": "http.disconnect"}


class Prompts:
    """Prompts that a test writes for, instead of an engine."""

    def __init__(self, num_prompts: int) -> None:
        self.readers = Readers(asyncio.get_running_loop(), Histogram(), Histogram())
        self.aborted: list[Job] = []
        ids = TokenIds.of([5])
        self.jobs = [
            Job(str(number), None, ids, SamplingParams(), "", 0, True, time.monotonic())
            for number in range(num_prompts)
        ]
        for job in self.jobs:
            job.output = RequestOutput(job.request_id, None, [5], [CompletionOutput(0)])
        self.generation = Generation([ids] * num_prompts)
        self.generation.streams += [Stream(job, self.readers, self.aborted.append) for job in self.jobs]

    def write(self, position: int, text: str, *, ends: bool = False) -> None:
        """Write a token's text, as a step of an engine does."""
        output = self.jobs[position].output
        assert output is not None
        output.metrics.num_output_tokens += 1
        completion = output.outputs[0]
        completion.token_ids.append(7)
        completion.text += text
        if ends:
            completion.finish_reason, output.finished = "stop", True
        self.readers.ring()


async def settle() -> None:
    """Let everything happen that waits for nothing."""
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def answering(prompts: Prompts, client: Client, **limits: float) -> AsyncIterator["asyncio.Task[None]"]:
    """An answer on its way, which has begun. Its task must be done at the end."""
    options = {"keep_alive_s": 0.0, "write_timeout_s": 60.0, **limits}
    answer = EventStream(Words(), prompts.generation, last=b"last", idle=b"idle ", **options)
    scope: dict[str, Any] = {"type": "http"}
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    task = asyncio.ensure_future(answer(scope, client.receive, client.send))
    await settle()
    yield task
    await settle()
    assert task.done()
    assert failures == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(limited())
