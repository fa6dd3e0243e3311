"""GET /health, /ready, /load, /metrics, /v1/models and /version: what the server is and how it is doing."""

from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.models import SamplingDefaults
from octavo.server.api.anthropic.probes import is_anthropics, model_info, model_page
from octavo.server.api.sse import encode, json_response
from octavo.server.api.structs import JsonObject
from octavo.server.context import VERSION, Context
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.reading.requests import check_model


class Health(msgspec.Struct):
    """Answer of GET /health and /ready.

    Attributes:
        status: loading, restarting (loading again, after the engine died), ready, draining, stalled or dead.
        seconds_since_progress: how long the current step has taken; 0 when there is nothing to do.
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
    return json_response(Load(context.loop.stats().num_live))


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


class ModelCard(Struct, kw_only=True):
    """A model that is served.

    Attributes:
        default_sampling_params: values of fields that a request leaves open, if they are not neutral.
        generation_config: name of the file that they are from.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int | None
    default_sampling_params: dict[str, int | float]
    generation_config: str | None
    permission: list[JsonObject] = []


class ModelList(Struct, kw_only=True):
    """Answer of GET /v1/models.

    Attributes:
        models: what Codex looks for, a catalogue of its maker's; empty: it keeps its own.
    """

    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[JsonObject] = []


class Version(Struct):
    """Answer of GET /version."""

    version: str


async def models(context: Context, request: Request) -> Response:
    """List the one model."""
    if is_anthropics(request):
        return json_response(model_page(_info(context)))
    return json_response(ModelList(data=[_card(context)]))


async def model(context: Context, request: Request) -> Response:
    """Describe a model by name."""
    check_model(request.path_params["name"], context.model)
    found = _info(context) if is_anthropics(request) else _card(context)
    return json_response(found)


async def version(context: Context, request: Request) -> Response:
    """Tell the version."""
    return json_response(Version(VERSION))


def _info(context: Context) -> dict[str, Any]:
    card = _card(context)
    return model_info(card.id, card.created, card.max_model_len)


def _card(context: Context) -> ModelCard:
    loop = context.loop
    is_loaded = loop.state in ("ready", "draining")
    defaults = loop.engine.sampling_defaults if is_loaded else SamplingDefaults()
    return ModelCard(
        id=context.model,
        created=context.created,
        root=context.model,
        max_model_len=loop.engine.plan.max_model_len if is_loaded else None,
        default_sampling_params=dict(defaults.values),
        generation_config=None if defaults.path is None else defaults.path.name,
    )
