"""Bodies of every route that reads one, and what may be changed in them."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from octavo.server.api.anthropic.messages_structs import CountRequest, MessagesRequest
from octavo.server.api.responses.response_structs import ResponsesRequest
from octavo.server.api.structs import ChatRequest, CompletionRequest
from octavo.server.api.tokenize import DetokenizeRequest, TokenizeRequest

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tell it.", "parameters": PARAMETERS, "strict": True}
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}

ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (
        CompletionRequest,
        {
            "prompt": [[5, 6], [7]],
            "max_tokens": 1,
            "stop": ["x"],
            "stop_token_ids": [9],
            "logit_bias": {"5": 1.0},
            "structured_outputs": {"choice": ["a", "b"]},
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        },
    ),
    "/v1/chat/completions": (
        ChatRequest,
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call-1", "content": "Sun"},
            ],
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": 1,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "metadata": {"a": "b"},
        },
    ),
    "/v1/responses": (
        ResponsesRequest,
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm"}],
                },
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
                {"type": "function_call_output", "call_id": "c", "output": "Sun"},
            ],
            "max_output_tokens": 1,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "integer"}}},
            "tools": [{"type": "function", **FUNCTION}],
            "metadata": {"a": "b"},
        },
    ),
    "/v1/messages": (
        MessagesRequest,
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Rome"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "text", "text": "Sun"}],
                            "is_error": False,
                        }
                    ],
                },
            ],
            "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
            "max_tokens": 1,
            "tools": [{"name": "weather", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "tool", "name": "weather"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    "/v1/messages/count_tokens": (CountRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/tokenize": (TokenizeRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5, 6]}),
}


def with_nulls(kind: type[msgspec.Struct]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a body with null for each field that need not be there, in the structs within it, too."""
    yield from _nulls(inspect.type_info(kind))


def _nulls(kind: inspect.Type) -> Iterator[tuple[str, Any]]:
    if isinstance(kind, inspect.Metadata):
        yield from _nulls(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for part in kind.types:
            yield from _nulls(part)
    elif isinstance(kind, inspect.ListType):
        for path, item in _nulls(kind.item_type):
            yield f"[0]{path}", [item]
    elif isinstance(kind, inspect.StructType):
        least = _least(kind)
        for field in kind.fields:
            if not field.required:
                yield f".{field.encode_name}", {**least, field.encode_name: None}
            for path, value in _nulls(field.type):
                yield f".{field.encode_name}{path}", {**least, field.encode_name: value}


def _least(kind: inspect.Type) -> Any:
    """Return a small value of a type."""
    if isinstance(kind, inspect.Metadata):
        return _least(kind.type)
    if isinstance(kind, inspect.UnionType):
        return _least(kind.types[0])
    if isinstance(kind, inspect.StructType):
        tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        return tag | {field.encode_name: _least(field.type) for field in kind.fields if field.required}
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    if isinstance(kind, inspect.ListType):
        return [_least(kind.item_type)]
    if isinstance(kind, inspect.DictType):
        return {}
    return {inspect.StrType: "a", inspect.IntType: 1, inspect.BoolType: True}[type(kind)]


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a body, the body's own first."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """Return a body with another value at a path."""
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed
