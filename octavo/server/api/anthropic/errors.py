"""Errors by Anthropic's form. Imports nothing of the engine."""

import msgspec

from octavo.server.api.anthropic.types import MessagesError, MessagesErrorBody
from octavo.server.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> bytes:
    """Return an error as a body."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    return msgspec.json.encode(
        MessagesErrorBody(error=MessagesError(type=kind, message=error.detail.message))
    )


def error_event(error: ApiError) -> bytes:
    """Return an error as an event; Anthropic's client raises on it."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
