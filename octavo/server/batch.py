"""Batches by OpenAI's form: a file of requests in, a file of answers out, one JSON object a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    {"id": "batch_req_...", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "...", "body": {...}}}

Each request passes the same gate as over HTTP, so limits, errors and answers are the same. Lines are written
as answers come, in any order.
"""

import asyncio
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.types import Message, Scope

from octavo.errors import EngineDeadError, PromptError
from octavo.progress import Report
from octavo.server.app import Gate
from octavo.server.loop.engine_loop import EngineLoop

# Enough to fill any engine's steps.
_NUM_AT_ONCE = 1024
# As OpenAI's.
_MAX_REQUESTS = 50_000
_MAX_LINE_BYTES = 8 << 20


class BatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    body: dict[str, Any]


class BatchResponse(Struct, kw_only=True):
    """What a server would have answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchLine(Struct, kw_only=True):
    """One line of the answers."""

    id: str
    custom_id: str
    response: BatchResponse
    error: None = None


def read_batch(path: Path) -> list[BatchRequest]:
    """Read a batch; empty lines do not count.

    Raises:
        PromptError: a line is too long or not a request, two have one custom_id, one is to be streamed, or
            there are too many.
        OSError: the file cannot be read.
    """
    requests: list[BatchRequest] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
            if not line.strip():
                continue
            request = _read_line(line, f"{path}, line {number}")
            if request.custom_id in seen:
                raise PromptError(f"{path}, line {number}: custom_id {request.custom_id!r} was there before")
            if len(requests) == _MAX_REQUESTS:
                raise PromptError(f"{path}: expected at most {_MAX_REQUESTS} requests; split the file")
            seen.add(request.custom_id)
            requests.append(request)
    return requests


def _read_line(line: bytes, where: str) -> BatchRequest:
    if len(line) > _MAX_LINE_BYTES:
        raise PromptError(f"{where}: expected at most {_MAX_LINE_BYTES} bytes")
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(f"{where}: expected a request of a batch: {error}") from error
    if request.body.get("stream"):
        raise PromptError(f"{where}: the answers of a batch are not streamed; leave out stream")
    return request


async def answer_all(
    gate: Gate, loop: EngineLoop, requests: list[BatchRequest], output: Path, report: Report
) -> int:
    """Write all answers to a file, each as soon as it is complete; return how many are errors.

    Args:
        gate: the application.
        loop: started.
        requests: with different ids.
        output: the file, which is overwritten.
        report: moves a progress bar.

    Raises:
        EngineDeadError: the engine could not be loaded, or died; what was answered before is written.
        OSError: the file cannot be written.
    """
    await loop.wait_until_ready()
    turns = asyncio.Semaphore(_NUM_AT_ONCE)
    num_failed = num_done = 0

    async def answer(request: BatchRequest) -> BatchLine:
        async with turns:
            return await _answer(gate, request)

    with output.open("wb") as file:
        for coming in asyncio.as_completed([asyncio.ensure_future(answer(request)) for request in requests]):
            line = await coming
            if loop.error is not None:
                raise EngineDeadError(f"the engine died after {num_done} of {len(requests)} requests")
            file.write(msgspec.json.encode(line) + b"\n")
            num_failed += line.response.status_code != 200
            num_done += 1
            report("answering", num_done, len(requests))
    return num_failed


async def _answer(gate: Gate, request: BatchRequest) -> BatchLine:
    """Send a request through the gate as a server would."""
    scope: Scope = {
        "type": "http",
        "method": request.method,
        "path": request.url,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    incoming = [msgspec.json.encode(request.body)]
    sent: list[Message] = []

    async def receive() -> Message:
        if incoming:
            return {"type": "http.request", "body": incoming.pop(), "more_body": False}
        # The client never leaves.
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    await gate(scope, receive, send)
    response = BatchResponse(
        status_code=sent[0]["status"],
        request_id=scope["octavo.request_id"],
        body=msgspec.Raw(b"".join(message.get("body", b"") for message in sent[1:])),
    )
    return BatchLine(id=f"batch_req_{uuid.uuid4().hex}", custom_id=request.custom_id, response=response)
