"""Visits of a soak: each asks for one thing, as a client would who may leave at any moment.

A visit is a few requests of which the later ones need what the first one answered, such as a conversation.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from stream_client import exchange, head_of

Visit = Callable[["Visitor"], Awaitable[None]]
# Of all answers so many are cut after their head, and so many requests before an answer.
_CUT, _GONE = 0.1, 0.05
_BOUNDARY = "edge"


class HasLeft(Exception):
    """The client has cut its connection, and asks nothing more."""


class Visitor:
    """One client.

    Attributes:
        rng: decides.
        text: a text of its own.
    """

    def __init__(self, port: int, rng: random.Random, text: str) -> None:
        self._port = port
        self.rng, self.text = rng, text

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        status: int = 200,
        kind: str = "application/json",
    ) -> Any:
        """Send a request and return its answer, which is decoded if it is JSON.

        Args:
            path: with its query.
            body: JSON, or bytes of a `kind` of content.
            method: of HTTP.
            status: what must come.
            kind: type of content.

        Raises:
            HasLeft: it left before the end of the answer.
            AssertionError: another status came.
        """
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        request = head_of(method, path, len(data), kind) + data
        if self.rng.random() < _GONE:
            await self._leave_early(request)
        answer = await exchange(self._port, request)
        try:
            assert answer.status == status, (answer.status, method, path, body, await answer.body())
            is_cut, pieces = self.rng.random() < _CUT, []
            async for piece in answer.pieces():
                pieces.append(piece)
                if is_cut:
                    raise HasLeft
        finally:
            answer.cut()
        whole = b"".join(pieces)
        return json.loads(whole) if answer.headers["content-type"] == "application/json" else whole

    async def _leave_early(self, request: bytes) -> None:
        """Leave in the middle of a request, or while it is worked on."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(request[: self.rng.choice([len(request), len(request) // 2])])
        await asyncio.sleep(self.rng.random() * 0.03)
        writer.transport.abort()
        raise HasLeft


class _Patient(random.Random):
    """Never decides to leave."""

    def random(self) -> float:
        return 1.0


def _streams(visitor: Visitor) -> dict[str, bool]:
    return {"stream": True} if visitor.rng.random() < 0.5 else {}


async def _responses(visitor: Visitor) -> None:
    fields = {"max_output_tokens": visitor.rng.randrange(1, 12), "temperature": 0}
    first = await visitor.ask("/v1/responses", {"input": visitor.text, **fields})
    path = f"/v1/responses/{first['id']}"
    await visitor.ask(f"{path}/input_items", method="GET")
    goes_on = {"input": "More.", "previous_response_id": first["id"], **fields}
    await visitor.ask("/v1/responses", {**goes_on, **_streams(visitor)})
    await visitor.ask(path, method="DELETE")
    await visitor.ask("/v1/responses", goes_on, status=404)


async def _conversations(visitor: Visitor) -> None:
    item = {"type": "message", "role": "user", "content": visitor.text}
    made = await visitor.ask("/v1/conversations", {"items": [item]})
    path = f"/v1/conversations/{made['id']}"
    body = {"input": "Hi", "conversation": made["id"], "max_output_tokens": 3, "temperature": 0}
    await visitor.ask("/v1/responses", {**body, **_streams(visitor)})
    await visitor.ask(f"{path}/items", {"items": [item]})
    listed = await visitor.ask(f"{path}/items?limit=2", method="GET")
    await visitor.ask(f"{path}/items/{listed['data'][0]['id']}", method="DELETE")
    await visitor.ask(path, method="DELETE")


async def _messages(visitor: Visitor) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": visitor.text}]}
    await visitor.ask("/v1/messages/count_tokens", body)
    await visitor.ask("/v1/messages", {**body, "max_tokens": 8, **_streams(visitor)})
    await visitor.ask("/v1/messages", {**body, "max_tokens": 8, "nothing": 1}, status=400)


async def _decisions(visitor: Visitor) -> None:
    questions = [f"Is it {number}?" for number in range(visitor.rng.randrange(1, 24))]
    await visitor.ask("/v1/decisions", {"input": visitor.text, "questions": questions})
    await visitor.ask("/v1/decisions", {"input": visitor.text, "questions": []}, status=400)


async def _ollama(visitor: Visitor) -> None:
    fields = {"model": "tiny", "options": {"num_predict": 8}, "stream": visitor.rng.random() < 0.5}
    message = {"role": "user", "content": visitor.text}
    await visitor.ask("/api/tags", method="GET")
    await visitor.ask("/api/chat", {**fields, "messages": [message]})
    await visitor.ask("/api/generate", {**fields, "prompt": visitor.text})


async def _batches(visitor: Visitor) -> None:
    body = {"prompt": visitor.text, "max_tokens": 4}
    lines = [{"custom_id": str(number), "url": "/v1/completions", "body": body} for number in range(8)]
    form = _form("\n".join(map(json.dumps, lines)))
    file = await visitor.ask("/v1/files", form, kind=f"multipart/form-data; boundary={_BOUNDARY}")
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await visitor.ask("/v1/batches", wanted)
    if visitor.rng.random() < 0.3:
        await visitor.ask(f"/v1/batches/{batch['id']}/cancel")
    await visitor.ask(f"/v1/files/{file['id']}/content", method="GET")
    await visitor.ask("/v1/batches?limit=3", method="GET")


def _form(content: str) -> bytes:
    head = f"--{_BOUNDARY}\r\nContent-Disposition: form-data; name="
    name = '"file"; filename="a.jsonl"'
    return f'{head}"purpose"\r\n\r\nbatch\r\n{head}{name}\r\n\r\n{content}\r\n--{_BOUNDARY}--\r\n'.encode()


async def delete_files(port: int) -> None:
    """Delete all files, which the server would keep for a month; a batch that still reads one fails."""
    visitor = Visitor(port, _Patient(), "")
    files = await visitor.ask("/v1/files?limit=1000", method="GET")
    for file in files["data"]:
        await visitor.ask(f"/v1/files/{file['id']}", method="DELETE")


async def _embeddings(visitor: Visitor) -> None:
    texts = [f"{visitor.text} {number}" for number in range(visitor.rng.randrange(1, 8))]
    form = {"encoding_format": visitor.rng.choice(["float", "base64"])}
    await visitor.ask("/v1/embeddings", {"input": texts, **form})
    await visitor.ask("/api/embed", {"model": "tiny", "input": texts})
    await visitor.ask("/v1/embeddings", {"input": []}, status=400)


async def _rerank(visitor: Visitor) -> None:
    documents = [f"{visitor.text} {number}" for number in range(visitor.rng.randrange(1, 8))]
    await visitor.ask("/v1/rerank", {"query": visitor.text, "documents": documents, "top_n": 2})
    await visitor.ask("/score", {"text_1": visitor.text, "text_2": documents})
    await visitor.ask("/pooling", {"input": documents})


VISITS: Mapping[str, Visit] = {
    "responses": _responses,
    "conversations": _conversations,
    "messages": _messages,
    "decisions": _decisions,
    "ollama": _ollama,
    "batches": _batches,
}
"""What clients do at a model that generates."""
POOLED_VISITS: Mapping[str, Visit] = {"embeddings": _embeddings, "rerank": _rerank}
"""What they do at one that embeds."""
