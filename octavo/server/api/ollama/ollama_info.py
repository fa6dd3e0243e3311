"""GET /api/tags, /api/ps, POST /api/show, and the routes of Ollama's that are refused."""

import hashlib
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api.body import decode
from octavo.server.api.ollama.ollama_structs import OllamaShow
from octavo.server.api.sse import json_response
from octavo.server.api_errors import ApiError
from octavo.server.context import Context
from octavo.server.reading.requests import check_model

# It stays loaded; clients want a time.
_NEVER = "9999-12-31T23:59:59Z"
REFUSED = (
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
)


async def tags(context: Context, request: Request) -> Response:
    """List the one model."""
    return json_response({"models": [{**_named(context), "modified_at": _started(context)}]})


async def ps(context: Context, request: Request) -> Response:
    """List the one model if it is loaded."""
    if context.loop.state not in ("ready", "draining"):
        return json_response({"models": []})
    plan = context.loop.engine.plan
    size = _num_bytes(context)
    loaded = {
        "expires_at": _NEVER,
        "size_vram": size if plan.device.type == "cuda" else 0,
        "context_length": plan.max_model_len,
    }
    return json_response({"models": [{**_named(context), **loaded}]})


async def show(context: Context, request: Request) -> Response:
    """Describe the model."""
    body = await context.bodies.read(request.scope, request.receive)
    fields, _ = decode(body, OllamaShow)
    check_model(fields.model or fields.name or "", context.model)
    materials, plan = context.materials, context.engine.plan
    formats, tokenizer = materials.formats, context.engine.tokenizer
    template = tokenizer.chat_template if tokenizer else None
    architecture = plan.model.architecture
    generates = plan.model.pooling is None
    capabilities = {
        "completion": generates,
        "tools": generates and formats.can_call,
        "thinking": generates and (formats.reasoning is not None or formats.harmony is not None),
        "embedding": plan.model.pooling is not None and plan.model.pooling.task == "embed",
    }
    return json_response(
        {
            "modified_at": _started(context),
            "template": "" if template is None else template.source,
            "modelfile": "",
            "license": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in materials.defaults.items()),
            "details": _details(context),
            "model_info": {
                "general.architecture": architecture,
                f"{architecture}.context_length": plan.max_model_len,
                f"{architecture}.embedding_length": plan.model.hidden_size,
                f"{architecture}.block_count": plan.model.num_layers,
            },
            "capabilities": [name for name, has_it in capabilities.items() if has_it],
        }
    )


async def refuse(context: Context, request: Request) -> Response:
    """Refuse to change which models there are."""
    path = context.path_of(request)
    text = f"{path} is not supported: this server serves {context.model!r} only, as it was started"
    raise ApiError(400, text, code="unsupported_route")


def _named(context: Context) -> dict[str, Any]:
    name = context.model
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
    return {
        "name": name,
        "model": name,
        "size": _num_bytes(context),
        "digest": digest,
        "details": _details(context),
    }


def _num_bytes(context: Context) -> int:
    """Return the bytes of the weights; 0 until the model is loaded."""
    if context.loop.state not in ("ready", "draining"):
        return 0
    return round(sum(group.num_bytes for group in context.loop.engine.plan.weights))


def _details(context: Context) -> dict[str, Any]:
    is_loaded = context.loop.state in ("ready", "draining")
    family = context.loop.engine.plan.model.architecture if is_loaded else ""
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _started(context: Context) -> str:
    return datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")
