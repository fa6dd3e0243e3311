"""Bodies of Ollama's API, and the lines of its answers."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.outputs import RequestOutput
from octavo.server.api.structs import MAX_MESSAGES, MAX_TOOLS, JsonObject, RequestBody, Stop, TokenLogprob


class Options(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options that say how to sample; the table of left_out.py has those that do not.

    Attributes:
        num_predict: most tokens; -1 and -2: as many as fit.
        repeat_last_n: how far back repeat_penalty looks. Here it sees everything, which -1 says.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    penalize_newline: bool | None = None


class _Fields(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """The fields that both bodies have. Answers are streamed unless `stream` is false."""

    api: ClassVar[str] = "ollama"

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | JsonObject | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class FunctionOfCall(Struct, kw_only=True):
    """A call: arguments are an object, not a text."""

    name: str
    arguments: JsonObject = {}


class Call(Struct, kw_only=True):
    """A call in a message."""

    function: FunctionOfCall
    id: str | UnsetType = UNSET


class GivenMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChat(_Fields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /api/chat. Without messages it asks to load the model."""

    messages: Annotated[list[GivenMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerate(_Fields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /api/generate. Without a prompt it asks to load the model.

    Attributes:
        raw: the prompt is continued as it is, without the chat template.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaShow(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /api/show; `name` is the field's old name."""

    api: ClassVar[str] = "ollama"

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class SaidMessage(Struct, kw_only=True):
    """The answer's message, or what is new in it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Line(Struct, kw_only=True):
    """One line of an answer; the last one has counts, and durations in nanoseconds.

    Attributes:
        message: of /api/chat.
        response, thinking: of /api/generate.
    """

    model: str
    created_at: str
    message: SaidMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def counts_of(output: RequestOutput) -> dict[str, int]:
    """Return the counts and durations of a finished output."""
    times = output.metrics
    first = times.first_token_s or times.arrival_s
    end = times.finished_s or first
    durations = {
        "total_duration": end - times.arrival_s,
        "load_duration": 0.0,
        "prompt_eval_duration": first - (times.first_scheduled_s or times.arrival_s),
        "eval_duration": end - first,
    }
    return {
        "prompt_eval_count": len(output.prompt_token_ids),
        "eval_count": len(output.outputs[0].token_ids),
        **{name: round(max(0.0, seconds) * 1e9) for name, seconds in durations.items()},
    }
