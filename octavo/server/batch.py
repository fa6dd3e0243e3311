"""Batches by OpenAI's form: a file of requests in, a file of answers out, one JSON object a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    {"id": "batch_req_...", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "...", "body": {...}}}

    a line that is no request
    {"id": "batch_req_...", "custom_id": null, "response": null,
     "error": {"code": "invalid_request", "message": "line 2: ...", "line": 2}}

Each request passes the same gate as over HTTP, so limits, errors and answers are the same. Lines are written
as answers come, in any order. A line that is no request is answered by an error of its own; the others run.
"""

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from starlette.types import ASGIApp, Message, Scope

from octavo.errors import EngineDeadError, PromptError
from octavo.json_file import without_mark
from octavo.progress import Report
from octavo.server.loop.engine_loop import EngineLoop

# Enough to fill any engine's steps.
_NUM_AT_ONCE = 1024
# OpenAI's limit.
_MAX_REQUESTS = 50_000
_MAX_LINE_BYTES = 8 << 20
# Bytes that are read at a time to find the end of such a line.
_PIECE_BYTES = 1 << 20


class BatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of a batch.

    Attributes:
        custom_id: the client's name of the line, another one for each.
        method: how the body would be sent.
        url: where.
        body: its own bytes, which the gate reads as it would over HTTP.
    """

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: Literal[
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
    ]
    body: Raw


class BatchResponse(Struct, kw_only=True):
    """The answer that a server would have given."""

    status_code: int
    request_id: str
    body: Raw


class BatchError(Struct, kw_only=True):
    """The error of a line: a code for programs, a sentence, and the line's number in the input."""

    code: str
    message: str
    line: int | UnsetType = UNSET


class BatchLine(Struct, kw_only=True):
    """One line of the answers: a response or an error.

    Attributes:
        custom_id: that of the request; None where its line has none that can be read.
    """

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def is_answered(self) -> bool:
        """True if the request succeeded."""
        return self.response is not None and self.response.status_code == 200


class _Streaming(Struct):
    """The field of a body that a batch refuses."""

    stream: object = None


def read_batch(path: Path) -> list[BatchRequest | BatchLine]:
    """Read a batch: requests, and answers to the lines that are no requests. Empty lines do not count.

    Raises:
        PromptError: there are too many lines.
        OSError: the file cannot be read.
    """
    found: list[BatchRequest | BatchLine] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            # A file may be several files, one after the other, each with a mark.
            line = without_mark(line)
            if not line.strip():
                continue
            if len(found) == _MAX_REQUESTS:
                raise PromptError(f"{path.name}: expected at most {_MAX_REQUESTS} requests; split the file")
            found.append(_read_line(line, number, seen))
    return found


def _lines(file: BufferedReader) -> Iterator[bytes]:
    """Yield lines; one that is too long is cut just after the limit."""
    while line := file.readline(_MAX_LINE_BYTES + 1):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(_PIECE_BYTES)


def _read_line(line: bytes, number: int, seen: set[str]) -> BatchRequest | BatchLine:
    """Return a request, whose custom_id is `seen` from then on, or the answer to a line that is none."""
    if len(line) > _MAX_LINE_BYTES:
        return _refused(line, number, "line_too_long", f"expected at most {_MAX_LINE_BYTES} bytes")
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
        body = msgspec.json.decode(request.body, type=_Streaming)
    except msgspec.ValidationError as error:
        return _refused(line, number, "invalid_request", f"expected a request of a batch: {error}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _refused(line, number, "invalid_json", f"expected a JSON object: {error}")
    if body.stream:
        return _refused(
            line, number, "invalid_request", "the answers of a batch are not streamed; leave out stream"
        )
    if request.custom_id in seen:
        what = f"custom_id {request.custom_id!r} was there before"
        return _refused(line, number, "duplicate_custom_id", what)
    seen.add(request.custom_id)
    return request


def refused_url(request: BatchRequest, endpoint: str) -> BatchLine:
    """Return the answer to a line that is for another route than its batch."""
    error = BatchError(code="invalid_request", message=f"url: expected {endpoint}, got {request.url}")
    return BatchLine(id=_new_id(), custom_id=request.custom_id, error=error)


def _with_priority(body: Raw, priority: int) -> bytes:
    fields = msgspec.json.decode(body, type=dict[str, Raw])
    return msgspec.json.encode({**fields, "priority": priority})


def _refused(line: bytes, number: int, code: str, message: str) -> BatchLine:
    error = BatchError(code=code, message=f"line {number}: {message}", line=number)
    return BatchLine(id=_new_id(), custom_id=_custom_id_of(line), error=error)


def _custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of a line that is no request, if it has one."""
    if len(line) > _MAX_LINE_BYTES:
        return None
    try:
        found = msgspec.json.decode(line, type=dict[str, Raw]).get("custom_id", Raw(b"null"))
        return msgspec.json.decode(found, type=str | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def write_lines(lines: Iterable[BatchRequest | BatchLine], output: Path) -> int:
    """Write the answers to lines none of which is a request; return how many there are."""
    written = [msgspec.json.encode(line) + b"\n" for line in lines]
    output.write_bytes(b"".join(written))
    return len(written)


async def answer_all(
    gate: ASGIApp,
    loop: EngineLoop,
    requests: Sequence[BatchRequest | BatchLine],
    output: Path,
    report: Report,
) -> int:
    """Write all answers to a file, each as soon as it is complete; return how many are errors.

    Args:
        gate: the application.
        loop: started.
        requests: with different ids, and lines that are answered already.
        output: the file, which is overwritten.
        report: moves a progress bar.

    Raises:
        EngineDeadError: the engine could not be loaded, or died; what was answered before is written.
        OSError: the file cannot be written.
    """
    await loop.wait_until_ready()
    turns = asyncio.Semaphore(_NUM_AT_ONCE)
    num_failed = num_done = 0

    async def answer(request: BatchRequest | BatchLine) -> BatchLine:
        if isinstance(request, BatchLine):
            return request
        async with turns:
            return await answer_request(gate, request)

    with output.open("wb") as file:
        for coming in asyncio.as_completed([asyncio.ensure_future(answer(request)) for request in requests]):
            line = await coming
            if loop.error is not None:
                raise EngineDeadError(f"the engine died after {num_done} of {len(requests)} requests")
            file.write(msgspec.json.encode(line) + b"\n")
            num_failed += not line.is_answered
            num_done += 1
            report("answering", num_done, len(requests))
    return num_failed


async def answer_request(
    gate: ASGIApp, request: BatchRequest, holder: str | None = None, priority: int | None = None
) -> BatchLine:
    """Send a request through the gate as a server would.

    Args:
        gate: the application.
        request: the line.
        holder: digest of the key that was checked when the line came, empty for none; None: the door checks.
        priority: of the request, instead of its own.
    """
    scope: Scope = {
        "type": "http",
        "method": request.method,
        "path": request.url,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    if holder is not None:
        known = bytes.fromhex(holder) or None
        sender = known or b"batch"
        scope |= {"octavo.holder": known, "octavo.sender": sender, "octavo.request_id": _new_id()}
    incoming = [bytes(request.body) if priority is None else _with_priority(request.body, priority)]
    sent: list[Message] = []

    async def receive() -> Message:
        if incoming:
            return {"type": "http.request", "body": incoming.pop(), "more_body": False}
        # The client never leaves.
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    error = response = None
    try:
        await gate(scope, receive, send)
        response = BatchResponse(
            status_code=sent[0]["status"],
            request_id=scope["octavo.request_id"],
            body=Raw(b"".join(message.get("body", b"") for message in sent[1:])),
        )
    except Exception as failure:
        # The gate turns errors into answers, unless one has begun. The other requests go on.
        error = BatchError(code="server_error", message=f"internal error: {type(failure).__name__}")
    return BatchLine(id=_new_id(), custom_id=request.custom_id, response=response, error=error)
