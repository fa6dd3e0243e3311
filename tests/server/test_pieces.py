"""Whole answers whose long parts are written while they are sent."""

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from octavo.outputs import Logprob
from octavo.server.api.logprobs import LogprobWriter, prompt_logprobs
from octavo.server.entry.sending import Parts
from octavo.server.limits import ClientGoneError


class Answer(msgspec.Struct):
    first: Any
    text: str
    last: Any


class Client:
    """Takes what is sent, and keeps it if it `keeps`."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.sizes: list[int] = []
        self.kept: list[bytes] = []
        self.keeps = keeps
        self.delay_s = 0.0
        self.has_left = asyncio.Event()

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(self.delay_s)
        if message["type"] == "http.response.body":
            self.sizes.append(len(message["body"]))
            self.kept += [message["body"]] * self.keeps


def entries(num_tokens: int) -> list[dict[int, Logprob] | None]:
    shared = {token: Logprob(-0.5 * token - 0.125, token + 1, f"t{token}") for token in range(21)}
    return [None, *[shared] * (num_tokens - 1)]


async def sent(answer: Answer, parts: Parts, client: Client) -> bytes:
    await parts.response(answer, 60.0)({"type": "http"}, client.receive, client.send)
    return b"".join(client.kept)


def test_pieces_are_what_would_be_written_at_once() -> None:
    async def run() -> None:
        parts, client = Parts(), Client()
        # The text holds what could be taken for a place of a part, were it not escaped.
        answer = Answer(parts.later([1, "a\0b", None]), "x\0\\u0000", parts.later([]))
        assert (
            await sent(answer, parts, client)
            == b'{"first":[1,"a\\u0000b",null],"text":"x\\u0000\\\\u0000","last":[]}'
        )
        parts, client = Parts(), Client()
        answer = Answer(parts.later(prompt_logprobs(entries(500))), "", None)
        assert json.loads(await sent(answer, parts, client)) == json.loads(
            msgspec.json.encode(Answer(list(prompt_logprobs(entries(500))), "", None))
        )
        assert len(client.sizes) > 5
        assert max(client.sizes) < 80 << 10

    asyncio.run(run())


def test_an_answer_without_parts_has_its_length() -> None:
    response = Parts().response(Answer(1, "a", [2]), 1.0)
    assert response.headers["content-length"] == str(len(response.body))


@pytest.mark.parametrize("kind", ["prompt", "chat", "completion"])
def test_millions_of_log_probabilities_are_never_held(kind: str) -> None:
    async def run() -> None:
        parts, client, found = Parts(), Client(keeps=False), entries(4000)
        writer, token_ids = LogprobWriter(None, 20), [3] * 4000
        if kind == "prompt":
            value = parts.later(prompt_logprobs(found))
        elif kind == "chat":
            value = writer.chat(token_ids[1:], found[1:], parts)  # type: ignore[arg-type]
        else:
            value = writer.completion(token_ids, found, 0, parts)
        response = parts.response(Answer(value, "", None), 60.0)
        tracemalloc.start()
        await response({"type": "http"}, client.receive, client.send)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(client.sizes) > 1 << 20
        assert peak < 1 << 19

    asyncio.run(run())


def test_a_client_that_reads_nothing_or_leaves_ends_the_writing() -> None:
    async def run() -> None:
        written = 0

        def values() -> Iterator[str]:
            nonlocal written
            for _ in range(1000):
                written += 1
                yield "x" * 10_000

        for leaves in (False, True):
            parts, client = Parts(), Client()
            written = 0
            if leaves:
                asyncio.get_running_loop().call_later(0.05, client.has_left.set)
            response = parts.response(Answer(parts.later(values()), "", None), 3600.0 if leaves else 0.05)
            task = asyncio.ensure_future(response({"type": "http"}, client.receive, client.send))
            await asyncio.sleep(0)
            client.delay_s = 3600
            with pytest.raises(ClientGoneError):
                await asyncio.wait_for(task, 60)
            assert written < 100

    asyncio.run(run())
