"""What Anthropic's clients ask beside messages: which models there are, and whether somebody answers."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import Context


def is_anthropics(request: Request) -> bool:
    """Return whether a client says which version of Anthropic's API it reads."""
    return "anthropic-version" in request.headers


def model_info(name: str, created_s: int, max_model_len: int | None) -> dict[str, Any]:
    """Describe a model, loaded at a time in seconds since the epoch; its length may not be known yet."""
    created = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = {"id": name, "type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
    return {**names, "max_input_tokens": max_model_len, "max_tokens": max_model_len}


def model_page(model: dict[str, Any]) -> dict[str, Any]:
    """List the one model."""
    return {"data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}


async def hello(context: Context, request: Request) -> Response:
    """Answer Claude Code, which asks so whether it is connected, and sends counts that are not kept."""
    return Response(b"{}", media_type="application/json")
