"""From typed errors to HTTP: a status, OpenAI's error body, and headers that say whether to try again."""

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import (
    ChatTemplateError,
    EngineDeadError,
    InvalidArgumentError,
    NotReadyError,
    OctavoError,
    OutOfMemoryError,
    PromptError,
    QueueFullError,
    RequestTooLongError,
    TemplateProcessError,
    TextOnlyError,
)
from octavo.tokenizer.messages import is_medium

_FIELD = re.compile(r"[a-z][a-z0-9_]*")
TEXT_ONLY = "text_only"
EVENT_END = b"\n\n"
_REPLICA_DIED = "the replica that wrote this answer died"


class ErrorDetail(msgspec.Struct, kw_only=True):
    """An error: a sentence, its kind, the field it is about, and a code for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer that reports a failure."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that reports a failure.

    Attributes:
        status: HTTP status.
        detail: the body.
        headers: further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=type, param=param, code=code)
        self.headers = headers or {}

    @classmethod
    def of(cls, status: int, detail: ErrorDetail, headers: dict[str, str]) -> "ApiError":
        """Return an error that another process has reported."""
        error = cls(status, detail.message, headers=headers)
        error.detail = detail
        return error

    @property
    def body(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(ErrorBody(self.detail))


def ollama_error(error: ApiError) -> bytes:
    """Return an error in the form of Ollama's API."""
    return msgspec.json.encode({"error": error.detail.message})


def too_many_bodies() -> ApiError:
    """Return the refusal of a body while others take all the room or time there is for reading."""
    return ApiError(
        429,
        "too many large bodies are being read",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


def as_api_error(error: BaseException) -> ApiError:
    """Turn any error into an answer. Clients learn only the type of an unexpected error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return _try_later(429, str(error), "rate_limit_exceeded", error.retry_after_s)
    if isinstance(error, NotReadyError | TemplateProcessError):
        return _try_later(503, str(error), "not_ready", 1.0)
    if isinstance(error, RequestTooLongError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, TextOnlyError):
        return ApiError(400, str(error), param="messages", code=TEXT_ONLY)
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), param="messages")
    if isinstance(error, PromptError):
        return ApiError(400, str(error), param="prompt")
    if isinstance(error, InvalidArgumentError):
        return ApiError(400, str(error), param=_named_field(str(error)))
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), type="server_error", code="engine_dead")
    headers = {"x-should-retry": "false"} if isinstance(error, OutOfMemoryError) else None
    message = str(error) if isinstance(error, OctavoError) else f"internal error: {type(error).__name__}"
    return ApiError(500, message, type="server_error", headers=headers)


def list_query(query: Mapping[str, str], *, limit: int, most: int) -> tuple[int, bool]:
    """Return how many items a list may have, and whether the newest is the first.

    Args:
        query: of the request.
        limit: without one of its own.
        most: that it may be.

    Raises:
        ApiError: 400, limit or order is malformed.
    """
    size, order = query.get("limit", str(limit)), query.get("order", "desc")
    if not size.isdecimal() or len(size) > len(str(most)) or not 1 <= int(size) <= most:
        raise refused("limit", f"must be an integer in [1, {most}], got {size[:20]!r}")
    if order not in ("asc", "desc"):
        raise refused("order", f"must be asc or desc, got {order[:20]!r}")
    return int(size), order == "desc"


def refused(field: str, why: str) -> ApiError:
    """Refuse a field by name."""
    return ApiError(400, f"{field} {why}", param=field)


def refused_part(where: str, kind: object, why: str) -> ApiError:
    """Refuse a part of a message by its place and type; see `with_model`."""
    return ApiError(400, f"{where}: {why}"[:400], param=where, code=TEXT_ONLY if is_medium(kind) else None)


def with_model(error: ApiError, model: str) -> ApiError:
    """Return an error; one about an image, a sound or a file says which model reads text only."""
    if error.detail.code != TEXT_ONLY:
        return error
    message = f"the model {model!r} reads text only: {error.detail.message}"
    return ApiError(error.status, message, param=error.detail.param, code=TEXT_ONLY)


def _try_later(status: int, message: str, code: str, seconds: float) -> ApiError:
    headers = {
        "Retry-After": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }
    kind = "rate_limit_error" if status == 429 else "unavailable_error"
    return ApiError(status, message, type=kind, code=code, headers=headers)


def _named_field(message: str) -> str | None:
    """Return the field that a message is about: those of sampling parameters begin with the name."""
    word: Any = _FIELD.match(message)
    return word[0] if word and ("_" in word[0] or word[0] in ("n", "stop", "seed", "logprobs")) else None


def broken_stream_event(path: str) -> bytes:
    """Return the last event of a stream whose replica died, in the form of the API at `path`."""
    if path.startswith("/v1/responses"):
        detail = {"type": "error", "sequence_number": 0, "code": "replica_died", "message": _REPLICA_DIED}
        return b"event: error\ndata: " + msgspec.json.encode({**detail, "param": None}) + EVENT_END
    if path.startswith("/v1/messages"):
        gone = {"type": "error", "error": {"type": "api_error", "message": _REPLICA_DIED}}
        return b"event: error\ndata: " + msgspec.json.encode(gone) + EVENT_END
    error = ApiError(500, _REPLICA_DIED, type="server_error", code="replica_died")
    if path.startswith("/api/"):
        return ollama_error(error) + b"\n"
    return b"data: " + error.body + EVENT_END + b"data: [DONE]" + EVENT_END
