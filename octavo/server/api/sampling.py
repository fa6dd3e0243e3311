"""Converts the fields of a request to SamplingParams."""

from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from octavo.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutput
from octavo.server.api.structs import ChatRequest, CompletionRequest, SamplingFields
from octavo.server.api_errors import refused

_SAME_NAME = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name in SamplingParams.__dataclass_fields__ and name not in ("max_tokens", "logprobs")
)

Defaults = Mapping[str, int | float]
"""The model's values for fields that a request leaves open."""
NEUTRAL: Defaults = MappingProxyType({})
_values_of = attrgetter(*_SAME_NAME)
# Values of these may be lists and dictionaries.
_UNHASHED = frozenset({"stop", "stop_token_ids", "logit_bias", "structured"})


def completion_params(request: CompletionRequest, defaults: Defaults = NEUTRAL) -> SamplingParams:
    """Return what a completion asks for; max_tokens 0 with echo becomes 1, whose token is left out.

    Raises:
        SamplingParamsError: a value is out of range.
        ApiError: fields contradict each other.
    """
    options = _options(request, defaults)
    options["max_tokens"] = request.max_tokens
    if request.max_tokens == 0 and request.echo:
        options["max_tokens"] = 1
    options["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        if request.stream:
            raise refused(
                "echo", "with logprobs is not streamed: log-probabilities of a prompt come at the end"
            )
        options["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return _params(options)


def chat_params(request: ChatRequest, defaults: Defaults = NEUTRAL) -> SamplingParams:
    """Return what a chat asks for.

    Raises:
        SamplingParamsError: a value is out of range.
        ApiError: fields contradict each other.
    """
    options = _options(request, defaults)
    options["max_tokens"] = request.max_tokens
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise refused("max_completion_tokens", "and max_tokens contradict each other; give one of them")
        options["max_tokens"] = request.max_completion_tokens
    if not 0 <= (request.top_logprobs or 0) <= MAX_LOGPROBS:
        raise refused("top_logprobs", f"must be in [0, {MAX_LOGPROBS}], got {request.top_logprobs}")
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    return _params(options)


def _options(request: SamplingFields, defaults: Defaults) -> dict[str, Any]:
    options = request.stream_options
    if options and not request.stream and (options.include_usage or options.continuous_usage_stats):
        raise refused("stream_options", "needs stream: true")
    if request.stream and request.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "are not streamed; ask with stream: false")
    values = zip(_SAME_NAME, _values_of(request), strict=True)
    chosen = {name: value for name, value in values if value is not None}
    structured = _structured(request)
    return {**defaults, **chosen, **({} if structured is None else {"structured": structured})}


def _params(options: dict[str, Any]) -> SamplingParams:
    """Return checked parameters, from a cache: most requests repeat those of an earlier one."""
    return _checked(**options) if _UNHASHED.isdisjoint(options) else SamplingParams(**options)


@lru_cache(maxsize=256, typed=True)
def _checked(**options: Any) -> SamplingParams:
    return SamplingParams(**options)


def _structured(request: SamplingFields) -> StructuredOutput | None:
    form, structured = request.response_format, request.structured_outputs
    if structured is not None:
        if form is not None and form.type != "text":
            raise refused("structured_outputs", "and response_format contradict each other; give one of them")
        fields = {name: getattr(structured, name) for name in ("json_object", "regex", "choice", "grammar")}
        fields["json_schema"] = structured.json
        return StructuredOutput(**{name: value for name, value in fields.items() if value is not None})
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutput(json_object=True)
    if form.json_schema is None:
        raise refused("response_format", "needs json_schema, an object with a schema, for this type")
    return StructuredOutput(json_schema=form.json_schema.schema)
