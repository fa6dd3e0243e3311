"""The final event of a stream whose replica died."""

import msgspec

from octavo.server.errors import ApiError

EVENT_END = b"\n\n"
_MESSAGE = "the replica that wrote this answer died"


def last_words(path: str) -> bytes:
    """Return the last event of a broken stream, in the form of the API at `path`."""
    if path.startswith("/v1/responses"):
        detail = {"type": "error", "sequence_number": 0, "code": "replica_died", "message": _MESSAGE}
        return b"event: error\ndata: " + msgspec.json.encode({**detail, "param": None}) + EVENT_END
    if path.startswith("/v1/messages"):
        gone = {"type": "error", "error": {"type": "api_error", "message": _MESSAGE}}
        return b"event: error\ndata: " + msgspec.json.encode(gone) + EVENT_END
    error = ApiError(500, _MESSAGE, type="server_error", code="replica_died")
    return b"data: " + error.body + EVENT_END + b"data: [DONE]" + EVENT_END
