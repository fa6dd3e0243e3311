"""One request's body and its answer, with the headers that every answer has."""

from collections.abc import Mapping

from starlette.types import Message, Receive, Scope, Send

from octavo.server.api.anthropic.errors import error_body
from octavo.server.errors import ApiError

_ANTHROPIC = "/v1/messages"


class Body:
    """A request's body.

    Attributes:
        is_read: nothing of it is left on the connection, which may carry further requests.
    """

    def __init__(self, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        self._receive = receive
        self.is_read = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"

    async def receive(self) -> Message:
        """Return the next message from the client."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.is_read = True
        return message


class Answer:
    """One client's answer.

    Attributes:
        status: once it is sent; 499 if the client left before.
        has_begun: the status was sent.
    """

    def __init__(self, send: Send, scope: Scope, path: str, body: Body) -> None:
        self._send = send
        self._scope = scope
        self._is_anthropic = path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")
        self._body = body
        self.status = 0
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send a message; complete the first one's headers."""
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message["headers"],
                *self._names(),
                (b"x-content-type-options", b"nosniff"),
            ]
        await self.send_as_it_is(message)

    async def send_as_it_is(self, message: Message) -> None:
        """Send a message that another process has written, with its headers."""
        if message["type"] == "http.response.start":
            self.status, self.has_begun = message["status"], True
            if not self._body.is_read:
                # What is left of the body would be taken for the next request.
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """Send an error."""
        body = error_body(error) if self._is_anthropic else error.body
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        listed = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": listed})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _names(self) -> list[tuple[bytes, bytes]]:
        """Return the headers with the request's id; Anthropic's client reads another one."""
        request_id = self._scope.get("octavo.request_id", "").encode()
        return [(b"x-request-id", request_id)] + [(b"request-id", request_id)] * self._is_anthropic
