"""Reads a body into its struct.

An unknown field is refused with the nearest name, a known one that Octavo lacks with the reason.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from octavo.errors import suggest
from octavo.server.api.left_out import leave_out, may_hold_more, tool_name
from octavo.server.api.structs import RequestBody, StreamOptions
from octavo.server.api_errors import TEXT_ONLY, ApiError

Body = TypeVar("Body", bound=RequestBody)

_CHATS_ONLY = "is supported by /v1/chat/completions only"
_OLD_TOOLS = "is an old name of OpenAI's; give tools and tool_choice to /v1/chat/completions"
_GUIDED = "is an old name of vLLM's; give structured_outputs"
_STORE = "needs a server that keeps answers (octavo serve --response-store-mib); or send all items"
_TEXT_ONLY = "is not supported: this server reads and writes text only"

# Fields of other servers: why they are refused, and which values ask for nothing.
REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "best_of": ("is not supported; ask for n completions and choose by their log-probabilities", (None, 1)),
    "use_beam_search": ("is not supported; sample n completions instead", (None, False)),
    "suffix": ("is not supported: models are asked to continue, not to fill in", (None, "")),
    "guided_json": (_GUIDED, (None,)),
    "guided_regex": (_GUIDED, (None,)),
    "guided_choice": (_GUIDED, (None,)),
    "guided_grammar": (_GUIDED, (None,)),
    "guided_decoding_backend": (_GUIDED, (None,)),
    "guided_whitespace_pattern": (_GUIDED, (None,)),
    "tools": (_CHATS_ONLY, (None, [])),
    "tool_choice": (_CHATS_ONLY, (None, "none", "auto")),
    "functions": (_OLD_TOOLS, (None, [])),
    "function_call": (_OLD_TOOLS, (None, "none", "auto")),
    "chat_template": ("is not taken from requests; the model's own is used", (None,)),
    "allowed_token_ids": ("is not supported; give logit_bias to the ids you do not want", (None,)),
    "bad_words": ("is not supported; give logit_bias to their token ids", (None, [])),
    "logprob_token_ids": ("is not supported; ask for logprobs of the most likely tokens", (None, [])),
    "repetition_detection": ("is not supported; use repetition_penalty or stop", (None,)),
    "vllm_xargs": ("is not supported: it is for vLLM's plugins", (None, {})),
    "kv_transfer_params": ("is not supported: caches are not moved between servers", (None, {})),
    "prompt_embeds": ("is not supported: send text or token ids", (None,)),
    "mm_processor_kwargs": (_TEXT_ONLY, (None, {})),
    "modalities": (_TEXT_ONLY, (None, ["text"])),
    "audio": (_TEXT_ONLY, (None,)),
    "prediction": ("is not supported", (None,)),
    "documents": ("is not supported; put them into a message", (None, [])),
    "logits_processors": ("is not supported: this server runs no code of requests", (None, [])),
    "include_reasoning": ("is not supported: reasoning is a field of the answer", (None, True)),
    "separate_reasoning": ("is not supported: reasoning is a field of the answer", (None, True)),
    "num_ctx": ("is not taken from requests; see octavo serve --max-model-len", (None,)),
    "template": ("is not taken from requests; the model's own is used", (None, "")),
    "context": ("is not supported: nothing is kept; send the conversation to /api/chat", (None, [])),
    "images": (_TEXT_ONLY, (None, [])),
    "width": (_TEXT_ONLY, (None, 0)),
    "height": (_TEXT_ONLY, (None, 0)),
    "steps": (_TEXT_ONLY, (None, 0)),
    "length_penalty": ("belongs to beam search, which is not supported", (None, 1, 1.0)),
    "early_stopping": ("belongs to beam search, which is not supported", (None, False)),
    "background": ("is not supported: this server keeps no answers", (None, False)),
    "previous_response_id": (_STORE, (None,)),
    "conversation": (_STORE, (None,)),
    "prompt_id": ("is not supported: this server keeps no prompts", (None,)),
    "prompt": ("belongs to /v1/completions; this server keeps no prompts", (None,)),
    "background_options": ("is not supported: answers are not made in the background", (None,)),
    "image": (_TEXT_ONLY, (None,)),
    "include": ("is not supported: answers hold text only", (None, [])),
    "max_tool_calls": ("is not supported; parallel_tool_calls: false allows one", (None,)),
    "truncation": ("is not supported; shorten the input", (None, "disabled")),
    "container": ("is not supported: this server runs no code", (None,)),
    "compaction": ("is not supported: this server writes no summaries; ask for one in a message", (None,)),
}  # fmt: skip

_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`(?: - at `(.*)`)?$", re.DOTALL)
_PLACE = re.compile(r" - at (?:`key` in )?`(\$.*)`$")


def decode(body: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """Decode a body; return it, and the names of what was left out of it.

    Raises:
        ApiError: 400: no JSON, a wrong type or value, an unknown or a refused field.
    """
    try:
        found = msgspec.json.decode(body, type=kind)
        return _without_neutral(body, kind, None) if may_hold_more(body, kind.api) else (found, ())
    except msgspec.ValidationError as error:
        return _without_neutral(body, kind, error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body must be JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body nests too deep", code="invalid_json") from error


def _without_neutral(
    body: bytes, kind: type[Body], error: msgspec.ValidationError | None
) -> tuple[Body, tuple[str, ...]]:
    """Decode again without what is left out, and what Octavo lacks if its value asks for nothing."""
    fields = _as_object(body)
    if fields is not None:
        fields = without_nulls(fields, kind)
        left_out = leave_out(fields, kind.api)
        for name in fields.keys() & REFUSED.keys() - set(kind.__struct_fields__):
            why, neutral = REFUSED[name]
            if not _asks_for_nothing(fields.pop(name), neutral):
                code = TEXT_ONLY if why == _TEXT_ONLY else "unsupported_field"
                raise ApiError(400, f"{name} {why}", param=name, code=code) from error
        _refuse_structural_tags(fields)
        _refuse_choice(fields, kind.api)
        try:
            return msgspec.convert(fields, kind, str_keys=True), left_out
        except msgspec.ValidationError as found:
            error = found
        except RecursionError:
            raise ApiError(400, "the body nests too deep", code="invalid_json") from None
    assert error is not None
    raise _explained(error, kind)


def _refuse_structural_tags(fields: dict[str, Any]) -> None:
    for name in ("response_format", "structured_outputs"):
        found = fields.get(name)
        if isinstance(found, dict) and (found.get("type") == "structural_tag" or "structural_tag" in found):
            why = "cannot be a structural_tag here; give tools with strict: true, or a grammar"
            raise ApiError(400, f"{name} {why}", param=name, code="unsupported_field")


def _refuse_choice(fields: dict[str, Any], api: str) -> None:
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and (name := tool_name(choice.get("type"), api)):
        why = f"cannot be {name}: this server leaves out tools that it would have to run"
        raise ApiError(400, f"tool_choice {why}", param="tool_choice", code="unsupported_field")


def _as_object(body: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value is one of these, types included: 0 is not False.

    An object that may be empty may also hold what asks for nothing.
    """
    if isinstance(value, dict) and {} in neutral:
        return all(item in (None, [], {}) for item in value.values())
    return any(type(value) is type(other) and value == other for other in neutral)


def _explained(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> ApiError:
    message = str(error)
    unknown = _UNKNOWN.match(message)
    if unknown:
        name, place = unknown[1], (unknown[2] or "$").removeprefix("$").lstrip(".")
        hint = suggest(name[:100], _fields_at(kind, place))
        where = f" in {place}" if place else ""
        text = f"unknown field {name[:100]!r}{where}{hint}"
        return ApiError(400, text, param=name[:100], code="unknown_field")
    place_found = _PLACE.search(message)
    param = place_found[1].removeprefix("$").lstrip(".") or None if place_found else None
    if param is None:
        return ApiError(400, message)
    return ApiError(
        400, f"{param}: {message[: place_found.start()]}" if place_found else message, param=param
    )


def _fields_at(kind: type[msgspec.Struct], place: str) -> tuple[str, ...]:
    if not place:
        return kind.__struct_fields__
    return StreamOptions.__struct_fields__ if place == "stream_options" else ()


def without_nulls(value: Any, kind: type[msgspec.Struct]) -> Any:
    """Return a decoded body without nulls of unknown fields and of fields that need not be there.

    Args:
        value: JSON, decoded.
        kind: what it is to become.
    """
    return _pruned(value, _type_of(kind))


@lru_cache(maxsize=64)
def _type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _pruned(value: Any, kind: inspect.Type) -> Any:
    if isinstance(kind, inspect.Metadata):
        return _pruned(value, kind.type)
    if isinstance(kind, inspect.UnionType):
        return _of_union(value, kind)
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        return _struct(value, {field.encode_name: field for field in kind.fields})
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        return [_pruned(item, kind.item_type) for item in value]
    return value


def _of_union(value: Any, kind: inspect.UnionType) -> Any:
    """Prune a value as the one type of a union that it can be, structs by their tags."""
    tags = {part.tag: part for part in kind.types if isinstance(part, inspect.StructType)}
    lists = [part for part in map(_bare, kind.types) if isinstance(part, inspect.ListType)]
    if isinstance(value, list) and lists:
        return _pruned(value, lists[0])
    if isinstance(value, dict) and tags:
        tag = value.get("type")
        return _pruned(value, tags.get(tag if isinstance(tag, str) else None) or next(iter(tags.values())))
    return value


def _takes_null(kind: inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return any(isinstance(part, inspect.NoneType | inspect.AnyType) for part in kinds)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _struct(value: Mapping[str, Any], fields: Mapping[str, inspect.Field]) -> dict[str, Any]:
    return {
        name: item if name not in fields else _pruned(item, fields[name].type)
        for name, item in value.items()
        if item is not None or (name in fields and (fields[name].required or _takes_null(fields[name].type)))
    }
