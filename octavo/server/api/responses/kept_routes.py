"""What /v1/responses and /v1/conversations have kept: to read, to add to, to delete."""

import time
import uuid
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api.body import decode
from octavo.server.api.responses.response_store import OPTION, Items, Kept, ResponseStore, grow, page, with_id
from octavo.server.api.sse import json_response
from octavo.server.api.structs import JsonObject, RequestBody
from octavo.server.api_errors import ApiError, list_query, refused
from octavo.server.context import Context

_MAX_ITEMS = 100
_MAX_FIELDS = 16


class ConversationRequest(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/conversations, and of /v1/conversations/NAME, which takes no items."""

    items: Annotated[list[JsonObject], Meta(max_length=_MAX_ITEMS)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=_MAX_FIELDS)] | None = None


class ItemsRequest(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/conversations/NAME/items."""

    items: Annotated[list[JsonObject], Meta(max_length=_MAX_ITEMS)]


class Deleted(Struct, kw_only=True):
    """Answer of DELETE."""

    id: str
    object: str
    deleted: bool = True


def _store(context: Context) -> ResponseStore:
    if context.store is None:
        raise ApiError(404, f"this server keeps no answers and no conversations: {OPTION}", code="not_found")
    return context.store


def _kept(context: Context, request: Request, kind: str) -> tuple[ResponseStore, bytes | None, Kept]:
    """Return the store, the holder of the request's key, and what its path names, of a kind."""
    store, holder, name = _store(context), request.scope["octavo.holder"], request.path_params["name"]
    kept = store.get(holder, name)
    if kept.body["object"] != kind:
        raise ApiError(404, f"there is no {kind} by the id {name[:200]!r}", param="id", code="not_found")
    return store, holder, kept


def _page(request: Request, items: Items) -> Response:
    query = request.query_params
    limit, newest_first = list_query(query, limit=20, most=_MAX_ITEMS)
    return json_response(page(items, after=query.get("after"), limit=limit, newest_first=newest_first))


async def response(context: Context, request: Request) -> Response:
    """Answer with a response that is kept."""
    kept = _kept(context, request, "response")[2]
    if request.query_params.get("stream") == "true":
        raise refused("stream", "must be false: what is kept is told as a whole")
    return json_response(kept.body)


async def delete_response(context: Context, request: Request) -> Response:
    """Forget a response."""
    return _delete(context, request, "response")


def _delete(context: Context, request: Request, kind: str) -> Response:
    store, holder, kept = _kept(context, request, kind)
    store.remove(holder, kept.body["id"])
    return json_response(
        Deleted(id=kept.body["id"], object=f"{kind}.deleted" if kind == "conversation" else kind)
    )


async def input_items(context: Context, request: Request) -> Response:
    """List the items that a response's request gave."""
    return _page(request, _kept(context, request, "response")[2].given)


async def cancel(context: Context, request: Request) -> Response:
    """Refuse to cancel: a response that is kept has ended."""
    name = _kept(context, request, "response")[2].body["id"]
    raise ApiError(400, f"{name} has ended; only answers in the background can be cancelled", param="id")


async def create_conversation(context: Context, request: Request) -> Response:
    """Begin a conversation."""
    store = _store(context)
    fields, _ = decode(
        await context.bodies.read(request.scope, request.receive) or b"{}", ConversationRequest
    )
    items = tuple(with_id(item) for item in fields.items or ())
    body = {"id": f"conv-{uuid.uuid4().hex}", "object": "conversation", "created_at": int(time.time())}
    store.put(request.scope["octavo.holder"], Kept({**body, "metadata": fields.metadata or {}}, items, items))
    return json_response({**body, "metadata": fields.metadata or {}})


async def conversation(context: Context, request: Request) -> Response:
    """Answer with a conversation."""
    return json_response(_kept(context, request, "conversation")[2].body)


async def update_conversation(context: Context, request: Request) -> Response:
    """Change a conversation's metadata."""
    fields, _ = decode(await context.bodies.read(request.scope, request.receive), ConversationRequest)
    # It is looked up after the body has come: meanwhile it may have grown, or be gone.
    store, holder, kept = _kept(context, request, "conversation")
    if fields.items is not None:
        raise refused("items", "are added by POST /v1/conversations/NAME/items")
    body: dict[str, Any] = {**kept.body, "metadata": fields.metadata or {}}
    store.put(holder, kept._replace(body=body))
    return json_response(body)


async def delete_conversation(context: Context, request: Request) -> Response:
    """Forget a conversation."""
    return _delete(context, request, "conversation")


async def conversation_items(context: Context, request: Request) -> Response:
    """List a conversation's items."""
    return _page(request, _kept(context, request, "conversation")[2].items)


async def add_items(context: Context, request: Request) -> Response:
    """Add items to the end of a conversation."""
    store, holder, kept = _kept(context, request, "conversation")
    fields, _ = decode(await context.bodies.read(request.scope, request.receive), ItemsRequest)
    items = tuple(with_id(item) for item in fields.items)
    grow(store, holder, kept.body["id"], items)
    return json_response(page(items, after=None, limit=_MAX_ITEMS, newest_first=False))


def _item(request: Request, kept: Kept) -> dict[str, Any]:
    name = request.path_params["item"]
    found = next((item for item in kept.items if item["id"] == name), None)
    if found is None:
        raise ApiError(404, f"there is no item by the id {name[:200]!r}", param="id", code="not_found")
    return found


async def conversation_item(context: Context, request: Request) -> Response:
    """Answer with an item of a conversation."""
    return json_response(_item(request, _kept(context, request, "conversation")[2]))


async def delete_item(context: Context, request: Request) -> Response:
    """Forget an item of a conversation."""
    store, holder, kept = _kept(context, request, "conversation")
    gone = _item(request, kept)
    items = tuple(item for item in kept.items if item is not gone)
    store.put(holder, Kept(kept.body, items, items))
    return json_response(kept.body)


KEPT_ROUTES = (
    ("GET", "/v1/responses/{name}", response),
    ("DELETE", "/v1/responses/{name}", delete_response),
    ("GET", "/v1/responses/{name}/input_items", input_items),
    ("POST", "/v1/responses/{name}/cancel", cancel),
    ("POST", "/v1/conversations", create_conversation),
    ("GET", "/v1/conversations/{name}", conversation),
    ("POST", "/v1/conversations/{name}", update_conversation),
    ("DELETE", "/v1/conversations/{name}", delete_conversation),
    ("GET", "/v1/conversations/{name}/items", conversation_items),
    ("POST", "/v1/conversations/{name}/items", add_items),
    ("GET", "/v1/conversations/{name}/items/{item}", conversation_item),
    ("DELETE", "/v1/conversations/{name}/items/{item}", delete_item),
)
