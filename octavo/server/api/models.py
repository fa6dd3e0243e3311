"""GET /v1/models and /version."""

from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.models import SamplingDefaults
from octavo.server.api.sse import encode
from octavo.server.api.types import JsonObject
from octavo.server.context import VERSION, Context
from octavo.server.reading.input import check_model


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
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(Struct):
    """Answer of GET /version."""

    version: str


async def models(context: Context, request: Request) -> Response:
    """List the one model."""
    return Response(encode(ModelList(data=[_card(context)])), media_type="application/json")


async def model(context: Context, request: Request) -> Response:
    """Describe a model by name."""
    check_model(request.path_params["name"], context.model)
    return Response(encode(_card(context)), media_type="application/json")


async def version(context: Context, request: Request) -> Response:
    """Tell the version."""
    return Response(encode(Version(VERSION)), media_type="application/json")


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
