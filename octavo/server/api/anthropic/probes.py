"""What Anthropic's clients ask beside messages: which models there are, and whether somebody answers."""

from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import Context


class ModelInfo(Struct, kw_only=True):
    """The model, since when it is served (RFC 3339), and its tokens; null while it loads."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(Struct, kw_only=True):
    """All models, on one page."""

    data: list[ModelInfo]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def is_anthropics(request: Request) -> bool:
    """Return whether a client expects Anthropic's shape: it says which version of that it reads."""
    return "anthropic-version" in request.headers


def model_info(name: str, created_s: int, max_model_len: int | None) -> ModelInfo:
    """Describe a model that was loaded at a time, in seconds since the epoch."""
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=max_model_len,
        max_tokens=max_model_len,
    )


def model_page(model: ModelInfo) -> ModelPage:
    """List the one model."""
    return ModelPage(data=[model], first_id=model.id, last_id=model.id)


async def hello(context: Context, request: Request) -> Response:
    """Answer Claude Code, which asks so whether it is connected, and sends counts that are not kept."""
    return Response(b"{}", media_type="application/json")
