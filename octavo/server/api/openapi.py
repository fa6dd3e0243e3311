"""GET /openapi.json: the routes and their types, made from the structs."""

import functools
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api import server_info, structs, tokenize
from octavo.server.api.anthropic.messages_structs import (
    CountRequest,
    Message,
    MessagesErrorBody,
    MessagesRequest,
    TokenCount,
)
from octavo.server.api.batches.batch_routes import BatchCreate
from octavo.server.api.batches.store import BatchObject, FileObject
from octavo.server.api.decisions.decision_structs import Decisions, DecisionsRequest
from octavo.server.api.ollama.ollama_structs import Line, OllamaChat, OllamaGenerate, OllamaShow
from octavo.server.api.pooled import pooled_structs as pooled
from octavo.server.api.pooled.pooled_input import RANKS, SCORES
from octavo.server.api.responses import kept_routes as kept
from octavo.server.api.responses.response_structs import ResponseObject, ResponsesRequest
from octavo.server.api_errors import ErrorBody
from octavo.server.context import VERSION, Context

_Struct = type[msgspec.Struct] | type[dict]

# Method, path, what it does, body, answer, whether it streams.
_OPERATIONS: tuple[tuple[str, str, str, _Struct | None, _Struct | None, bool], ...] = (
    (
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        structs.ChatRequest,
        structs.ChatCompletion,
        True,
    ),
    ("post", "/v1/completions", "Continue prompts", structs.CompletionRequest, structs.Completion, True),
    ("post", "/v1/responses", "Answer an input", ResponsesRequest, ResponseObject, True),
    ("post", "/v1/messages", "Answer a conversation", MessagesRequest, Message, True),
    ("post", "/v1/messages/count_tokens", "Count the tokens", CountRequest, TokenCount, False),
    ("post", "/v1/decisions", "Answer many questions over one input", DecisionsRequest, Decisions, False),
    ("post", "/v1/embeddings", "Embed texts", pooled.EmbeddingRequest, pooled.PooledList, False),
    ("post", "/classify", "Classify texts", pooled.ClassifyRequest, pooled.PooledList, False),
    ("post", "/pooling", "Embed or classify texts", pooled.PoolingRequest, pooled.PooledList, False),
    *(
        ("post", path, "Score pairs of texts", pooled.ScoreRequest, pooled.PooledList, False)
        for path in SCORES
    ),
    *(("post", path, "Rank documents", pooled.RerankRequest, pooled.Ranking, False) for path in RANKS),
    ("get", "/v1/responses/{name}", "Return a kept response", None, ResponseObject, False),
    ("delete", "/v1/responses/{name}", "Forget a response", None, kept.Deleted, False),
    ("get", "/v1/responses/{name}/input_items", "List a kept response's input", None, dict, False),
    ("post", "/v1/responses/{name}/cancel", "Refused: no response runs in the background", None, dict, False),
    ("post", "/v1/conversations", "Begin a conversation", kept.ConversationRequest, dict, False),
    ("get", "/v1/conversations/{name}", "Return a conversation", None, dict, False),
    ("post", "/v1/conversations/{name}", "Change its metadata", kept.ConversationRequest, dict, False),
    ("delete", "/v1/conversations/{name}", "Forget a conversation", None, kept.Deleted, False),
    ("get", "/v1/conversations/{name}/items", "List its items", None, dict, False),
    ("post", "/v1/conversations/{name}/items", "Add items", kept.ItemsRequest, dict, False),
    ("get", "/v1/conversations/{name}/items/{item}", "Return an item", None, dict, False),
    ("delete", "/v1/conversations/{name}/items/{item}", "Forget an item", None, dict, False),
    ("post", "/v1/files", "Keep a file, sent as multipart/form-data", None, FileObject, False),
    ("get", "/v1/files", "List files", None, dict, False),
    ("get", "/v1/files/{name}", "Describe a file", None, FileObject, False),
    ("delete", "/v1/files/{name}", "Delete a file", None, dict, False),
    ("get", "/v1/files/{name}/content", "Return a file's content", None, None, False),
    ("post", "/v1/batches", "Answer the requests of a file", BatchCreate, BatchObject, False),
    ("get", "/v1/batches", "List batches", None, dict, False),
    ("get", "/v1/batches/{name}", "Describe a batch", None, BatchObject, False),
    ("post", "/v1/batches/{name}/cancel", "End a batch early", None, BatchObject, False),
    ("post", "/api/chat", "Answer a conversation", OllamaChat, Line, True),
    ("post", "/api/generate", "Continue a prompt", OllamaGenerate, Line, True),
    ("post", "/api/embed", "Embed texts", pooled.OllamaEmbed, dict, False),
    ("post", "/api/embeddings", "Embed a text", pooled.OllamaEmbeddings, dict, False),
    ("post", "/api/show", "Describe the model", OllamaShow, dict, False),
    ("get", "/api/tags", "List the model", None, dict, False),
    ("get", "/api/ps", "List what is loaded", None, dict, False),
    ("get", "/api/version", "Tell the version of Ollama's API", None, dict, False),
    ("get", "/v1/models", "List the model", None, server_info.ModelList, False),
    ("get", "/v1/models/{name}", "Describe the model", None, server_info.ModelCard, False),
    ("post", "/tokenize", "Turn text into token ids", tokenize.TokenizeRequest, tokenize.Tokens, False),
    ("post", "/detokenize", "Turn token ids into text", tokenize.DetokenizeRequest, tokenize.Text, False),
    ("get", "/health", "Is the engine alive?", None, server_info.Health, False),
    ("get", "/ready", "Does the server take requests?", None, server_info.Health, False),
    ("get", "/load", "Tell how many requests there are", None, server_info.Load, False),
    ("get", "/version", "Which version is this?", None, server_info.Version, False),
    ("get", "/metrics", "Metrics for Prometheus", None, None, False),
)
_UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}
_ERRORS = ("400", "401", "403", "404", "408", "413", "415", "429", "500", "503")


async def document(context: Context, request: Request) -> Response:
    """Describe the API."""
    return Response(_document(), media_type="application/json")


@functools.cache
def _document() -> bytes:
    kinds = {kind for _, _, _, body, answer, _ in _OPERATIONS for kind in (body, answer) if kind is not None}
    listed = [ErrorBody, MessagesErrorBody, *sorted(kinds, key=lambda kind: kind.__name__)]
    schemas, components = msgspec.json.schema_components(listed, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(listed, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, body, answer, streams in _OPERATIONS:
        error = schema_of[MessagesErrorBody if path.startswith("/v1/messages") else ErrorBody]
        stream = (
            ("application/x-ndjson" if path.startswith("/api/") else "text/event-stream") if streams else ""
        )
        operation = _operation(summary, body and schema_of[body], answer and schema_of[answer], error, stream)
        names = re.findall(r"{(\w+)}", path)
        if names:
            place = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **place} for name in names]
        paths.setdefault(path, {})[method] = operation
    form = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    paths["/v1/files"]["post"]["requestBody"] = form
    key = {"type": "http", "scheme": "bearer"}
    other_key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Octavo", "version": VERSION},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": key, "other_key": other_key}},
            "security": [{"key": []}, {"other_key": []}, {}],
        }
    )


def _operation(summary: str, body: object, answer: object, error: object, stream: str) -> dict[str, Any]:
    content: dict[str, Any] = (
        {"application/json": {"schema": answer}} if answer else {"text/plain": {"schema": {"type": "string"}}}
    )
    if stream:
        content[stream] = {"schema": {"type": "string"}}
    failed = {"description": "An error", "content": {"application/json": {"schema": error}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "Success", "content": content}} | dict.fromkeys(_ERRORS, failed),
    }
    if summary.endswith("?"):
        operation["responses"]["503"] = {"description": "No", "content": content}
    if body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
