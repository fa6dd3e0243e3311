"""GET /health (is it alive), /ready (does it take requests), /load (how many there are), /metrics."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api.sse import encode
from octavo.server.context import Context
from octavo.server.metrics import CONTENT_TYPE


class Health(msgspec.Struct):
    """Answer of GET /health and /ready.

    Attributes:
        status: loading, restarting (loading again, after the engine died), ready, draining, stalled or dead.
        seconds_since_progress: how long the step under way has taken; 0 when there is nothing to do.
    """

    status: str
    seconds_since_progress: float


async def health(context: Context, request: Request) -> Response:
    """Answer 200 while the engine loads or makes progress.

    503 when it is dead or restarts, when a step hangs, and when a rank is silent.
    """
    found = _health(context)
    return _answer(found, alive=found.status not in ("dead", "restarting", "stalled"))


async def ready(context: Context, request: Request) -> Response:
    """Answer 200 while requests are taken."""
    found = _health(context)
    return _answer(found, alive=found.status == "ready")


class Load(msgspec.Struct):
    """Answer of GET /load, in vLLM's form.

    Attributes:
        server_load: requests whose answers are not complete.
    """

    server_load: int


async def load(context: Context, request: Request) -> Response:
    """Tell how many requests there are."""
    return Response(encode(Load(context.loop.stats().num_live)), media_type="application/json")


async def metrics(context: Context, request: Request) -> Response:
    """Answer with Prometheus' text."""
    return Response(await context.run(request, context.metrics.text), headers={"content-type": CONTENT_TYPE})


def _health(context: Context) -> Health:
    seconds = context.loop.seconds_since_progress
    state: str = context.loop.state
    is_late = seconds > context.config.step_deadline_s or context.loop.has_late_rank
    if state in ("ready", "draining") and is_late:
        state = "stalled"
    if state == "loading" and context.num_restarts:
        state = "restarting"
    return Health(state, round(seconds, 3))


def _answer(found: Health, *, alive: bool) -> Response:
    headers = {} if alive else {"Retry-After": "1"}
    return Response(encode(found), 200 if alive else 503, headers, media_type="application/json")
