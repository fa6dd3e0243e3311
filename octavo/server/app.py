"""The application: routes, and the gate that every request passes."""

import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.api import openapi, server_info
from octavo.server.api.anthropic.messages_route import messages
from octavo.server.api.anthropic.probes import hello
from octavo.server.api.batches import batch_routes
from octavo.server.api.batches.runner import Runner
from octavo.server.api.batches.store import Store
from octavo.server.api.chat import chat_completions
from octavo.server.api.completions import completions
from octavo.server.api.decisions.decision_route import decisions
from octavo.server.api.ollama import ollama_info
from octavo.server.api.ollama.ollama_route import answer as ollama_answer
from octavo.server.api.pooled.pooled_input import POOLED
from octavo.server.api.pooled.pooled_route import pooled
from octavo.server.api.responses.kept_routes import KEPT_ROUTES
from octavo.server.api.responses.response_route import responses
from octavo.server.api_errors import ApiError, as_api_error, with_model
from octavo.server.config import ServerConfig
from octavo.server.context import Context
from octavo.server.entry.door import Door
from octavo.server.entry.sending import Answer, Body
from octavo.server.limits import ClientGoneError, presence_of
from octavo.server.live.routes import page_routes
from octavo.server.loop.engine_loop import EngineLoop

logger = logging.getLogger("octavo.server")

Endpoint = Callable[[Context, Request], Awaitable[Response]]


async def answer(context: Context, request: Request) -> Response:
    """Answer a body by what is read in it; see octavo.server.reading.kinds.ANSWERS."""
    return await context.answer(request)


ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", answer),
    ("POST", "/v1/decisions", decisions),
    *(("POST", path, pooled) for path in POOLED),
    ("GET", "/api/hello", hello),
    ("GET", "/v1/models", server_info.models),
    ("GET", "/v1/models/{name:path}", server_info.model),
    ("POST", "/tokenize", answer),
    ("POST", "/detokenize", answer),
    ("GET", "/health", server_info.health),
    ("GET", "/ping", server_info.health),
    ("GET", "/ready", server_info.ready),
    ("GET", "/load", server_info.load),
    ("GET", "/metrics", server_info.metrics),
    ("GET", "/version", server_info.version),
    ("GET", "/openapi.json", openapi.document),
    *KEPT_ROUTES,
    ("POST", "/v1/files", batch_routes.upload),
    ("GET", "/v1/files", batch_routes.files),
    ("GET", "/v1/files/{name}", batch_routes.file),
    ("DELETE", "/v1/files/{name}", batch_routes.delete),
    ("GET", "/v1/files/{name}/content", batch_routes.content),
    ("POST", "/v1/batches", batch_routes.create),
    ("GET", "/v1/batches", batch_routes.batches),
    ("GET", "/v1/batches/{name}", batch_routes.batch),
    ("POST", "/v1/batches/{name}/cancel", batch_routes.cancel),
    ("POST", "/api/chat", ollama_answer),
    ("POST", "/api/generate", ollama_answer),
    ("GET", "/api/tags", ollama_info.tags),
    ("GET", "/api/ps", ollama_info.ps),
    ("GET", "/api/version", server_info.version),
    ("POST", "/api/show", ollama_info.show),
    *((method, path, ollama_info.refuse) for method, path in ollama_info.REFUSED),
)
# How routes of other servers begin, and what to do without them.
_LACKING = {
    "/v1/messages/batches": "octavo run-batch answers a file without a server",
    "/api/": "of Ollama's API, chat, generate, embed, tags, ps, show and version are served",
}
# Probes, which come every few seconds.
_PROBED_PATHS = frozenset({"/health", "/ping", "/ready", "/load", "/metrics"})


def make_app(loop: EngineLoop, config: ServerConfig, model: str, num_restarts: int = 0) -> "Gate":
    """Return the ASGI application.

    Args:
        loop: runs the engine; may still load.
        config: the options.
        model: the name that clients give.
        num_restarts: processes before this one whose engine died.

    Raises:
        ConfigError: the keys cannot be read, or a library is missing.
    """
    context = Context(loop, config, config.served_model_name or model, num_restarts)
    routes = [Route(path, _bound(endpoint, context), methods=[method]) for method, path, endpoint in ROUTES]
    routes += page_routes(loop)
    posted = {path: endpoint for method, path, endpoint in ROUTES if method == "POST"}
    gate = Gate(Router(routes, redirect_slashes=False), posted, context)
    if config.batch_dir is not None:
        context.batches = Runner(Store(Path(config.batch_dir)), gate)
    return gate


def _bound(endpoint: Endpoint, context: Context) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return await endpoint(context, request)

    return respond


class Gate:
    """Lets a request in if its host and key are right; turns every error into an answer.

    Attributes:
        context: what the endpoints share.
        num_open: requests whose answers are not complete.
    """

    def __init__(self, app: ASGIApp, posted: Mapping[str, Endpoint], context: Context) -> None:
        """Make the gate.

        Args:
            app: answers all but what is posted to the paths of `posted`.
            posted: endpoints by path, without the detour over starlette's router.
            context: what the endpoints share.

        Raises:
            ConfigError: the keys cannot be read.
        """
        self._app = app
        self._posted = posted
        self._door = Door(context.config)
        self.context = context
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            raise ValueError(f"expected a request over HTTP, got {scope['type']}")
        begun = time.monotonic()
        path = scope["path"].removeprefix(self.context.config.root_path)
        headers = dict(scope["headers"])
        body = Body(headers, receive)
        answer = _Answer(send, scope, path, body)
        scope["octavo.send"] = send
        traces = self.context.traces
        trace = None if traces is None else traces.begin(scope, path)
        self.num_open += 1
        try:
            # A line of a batch was let in when the batch came.
            if "octavo.holder" not in scope:
                self._door.check(scope, path, headers)
            endpoint = self._posted.get(path) if scope["method"] == "POST" else None
            if endpoint is None:
                await self._app(scope, body.receive, answer.send)
            else:
                response = await endpoint(self.context, Request(scope, body.receive))
                await response(scope, body.receive, answer.send)
        except ClientGoneError:
            if not answer.has_begun:
                # The client may have sent half a body, and still wait for an answer.
                await answer.send_error(ApiError(400, "the body ended early", code="incomplete_body"))
            answer.status = 499
        except Exception as error:
            await self._fail(error, answer)
        finally:
            self.num_open -= 1
            presence_of(scope, body.receive).close()
            if trace is not None:
                trace.end(answer.status, scope["octavo.request_id"])
        self.context.metrics.note_answer(answer.status)
        if self.context.config.access_log and (path not in _PROBED_PATHS or answer.status >= 400):
            self._log(scope, answer.status, time.monotonic() - begun)

    async def _fail(self, error: Exception, answer: Answer) -> None:
        found = with_model(as_api_error(error), self.context.model)
        if found.status == 500:
            # A message might contain a prompt; the places in the code do not.
            frames = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a request failed with %s\n%s", type(error).__name__, frames)
        if answer.has_begun:
            raise error
        await answer.send_error(found)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = (scope.get("client") or ("-",))[0]
        # The path is written with escapes, because it may contain line breaks.
        method, path = scope["method"], scope["path"][:200]
        fields = {"client": client, "method": method, "path": path, "status": status, "seconds": seconds}
        fields["request_id"] = scope["octavo.request_id"]
        logger.info(
            "%s %s %r %d %.3f s", client, method, path, status, seconds, extra={"octavo_fields": fields}
        )


class _Answer(Answer):
    """One client's answer, with starlette's own errors in our form."""

    _is_replaced = False

    async def send(self, message: Message) -> None:
        """Send a message."""
        if message["type"] == "http.response.start":
            status = message["status"]
            if status in (404, 405) and b"application/json" not in dict(message["headers"]).values():
                await self.send_error(_no_route(self._scope, status))
                self._is_replaced = True
                return
        elif self._is_replaced:
            return
        await super().send(message)


def _no_route(scope: Scope, status: int) -> ApiError:
    if status == 405:
        routes = [route for route in scope["router"].routes if route.matches(scope)[0] != Match.NONE]
        allow = ", ".join(sorted({method for route in routes for method in route.methods}))
        message = f"{scope['method']} is not possible here, only {allow}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allow})
    path = scope["path"]
    why = next((f"; {why}" for begin, why in _LACKING.items() if path.startswith(begin)), "")
    return ApiError(404, f"there is no route {path[:200]!r}{why}", code="not_found")
