"""/v1/files and /v1/batches, as OpenAI's client uses them."""

import re
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from octavo.server.api.batches.runner import Runner
from octavo.server.api.batches.store import BatchObject, FileObject, Found
from octavo.server.api.body import decode
from octavo.server.api.sse import json_response
from octavo.server.api.structs import RequestBody
from octavo.server.api_errors import ApiError, list_query, refused
from octavo.server.context import Context, note_left_out

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^;\s]{1,70}))')
# Names in the head of a form's part, and the most parts and bytes of a head: real forms have far less.
_NAMES = re.compile(r';[ \t]*(name|filename)=(?:"([^"]*)"|([^;\s"]+))')
_MOST_PARTS, _MOST_HEAD_BYTES = 16, 2048
# Fields of an upload that may be left out: files are kept for one time.
_LEFT_OUT = {"expires_after[anchor]", "expires_after[seconds]"}


class BatchCreate(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/batches."""

    api: ClassVar[str] = "batches"

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


async def upload(context: Context, request: Request) -> Response:
    """Keep a file."""
    runner = _runner(context)
    body = await context.bodies.read(request.scope, request.receive, kind=b"multipart/form-data")
    fields = await context.run(request, _parts, body, request.headers.get("content-type", ""))
    note_left_out(request, sorted(fields.keys() & _LEFT_OUT))
    unknown = sorted(fields.keys() - {"file", "purpose"} - _LEFT_OUT)
    if unknown:
        raise ApiError(
            400, f"unknown field {unknown[0][:100]!r}", param=unknown[0][:100], code="unknown_field"
        )
    if "file" not in fields:
        raise refused("file", "is missing")
    if fields.get("purpose", ("", b""))[1] != b"batch":
        raise refused("purpose", "must be batch: files are for batches only")
    name, content = fields["file"]
    file = await context.run(request, runner.store.upload, _holder(request), name, content)
    return json_response(file)


async def files(context: Context, request: Request) -> Response:
    """List files."""
    return await _listed(context, request, FileObject)


async def file(context: Context, request: Request) -> Response:
    """Describe a file."""
    return json_response(_found(context, request, FileObject))


async def content(context: Context, request: Request) -> Response:
    """Answer with a file's content."""
    found = _found(context, request, FileObject)
    path = _runner(context).store.path(found.id)
    if not path.is_file():
        raise ApiError(404, f"the content of file {found.id!r} has been removed", code="not_found")
    return FileResponse(path, media_type="application/octet-stream")


async def delete(context: Context, request: Request) -> Response:
    """Remove a file."""
    found = _found(context, request, FileObject)
    await context.run(request, _runner(context).store.remove, found.id)
    return json_response({"id": found.id, "object": "file", "deleted": True})


async def create(context: Context, request: Request) -> Response:
    """Begin a batch."""
    runner = _runner(context)
    fields, left_out = decode(await context.bodies.read(request.scope, request.receive), BatchCreate)
    note_left_out(request, left_out)
    runner.store.get(_holder(request), fields.input_file_id, FileObject)
    given = {name: getattr(fields, name) for name in fields.__struct_fields__}
    batch = await context.run(request, runner.store.add_batch, _holder(request), given)
    runner.wake()
    return json_response(batch)


async def batches(context: Context, request: Request) -> Response:
    """List batches."""
    return await _listed(context, request, BatchObject)


async def batch(context: Context, request: Request) -> Response:
    """Describe a batch."""
    return json_response(_found(context, request, BatchObject))


async def cancel(context: Context, request: Request) -> Response:
    """End a batch."""
    found = _found(context, request, BatchObject)
    return json_response(found if found.is_over else await _runner(context).cancel(_holder(request), found))


def _runner(context: Context) -> Runner:
    if context.batches is None:
        text = "files and batches need a folder of the server's: start it with --batch-dir FOLDER"
        raise ApiError(404, text, code="no_batch_dir")
    return context.batches


def _holder(request: Request) -> str:
    return (request.scope["octavo.holder"] or b"").hex()


def _found(context: Context, request: Request, kind: type[Found]) -> Found:
    return _runner(context).store.get(_holder(request), request.path_params["name"], kind)


async def _listed(context: Context, request: Request, kind: type[Found]) -> Response:
    store, query, mine = _runner(context).store, request.query_params, _holder(request)
    limit, newest_first = list_query(query, limit=100, most=10_000)
    purpose = query.get("purpose")

    def is_wanted(holder: str, one: FileObject | BatchObject) -> bool:
        return holder == mine and (purpose is None or getattr(one, "purpose", None) == purpose)

    names = [key.id for key in await context.run(request, store.keys, kind, is_wanted)]
    if not newest_first:
        names.reverse()
    if "after" in query:
        if query["after"] not in names:
            raise refused("after", "is none of the list; it may have been removed: begin again without it")
        names = names[names.index(query["after"]) + 1 :]
    page = await context.run(request, store.described, mine, names[:limit], kind)
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": page, "has_more": limit < len(names), **ends})


def _parts(body: bytes, content_type: str) -> dict[str, tuple[str, bytes]]:
    """Return the parts of a form by name: the file's name and the content of each.

    Raises:
        ApiError: it is no form.
    """
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise ApiError(400, "expected a boundary in the header Content-Type", code="invalid_form")
    mark = b"\r\n--" + (boundary[1] or boundary[2]).encode("latin-1")
    pieces = (b"\r\n" + body).split(mark, _MOST_PARTS + 1)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        text = f"expected a form of at most {_MOST_PARTS} parts that end with the boundary"
        raise ApiError(400, text, code="invalid_form")
    found: dict[str, tuple[str, bytes]] = {}
    for piece in pieces[1:-1]:
        head, _, content = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        # Names come as UTF-8, as browsers and clients write them.
        text = head.decode("utf-8", "replace") if len(head) <= _MOST_HEAD_BYTES else ""
        lines = text.split("\r\n")
        line = next((one for one in lines if one.lower().startswith("content-disposition:")), "")
        names = {key: quoted or bare for key, quoted, bare in _NAMES.findall(line)}
        name = names.get("name", "")
        if not name or name in found:
            raise ApiError(400, "expected parts with names, each once", code="invalid_form")
        found[name] = names.get("filename", "file"), content
    return found
