"""The bodies of requests: decoded, checked, and converted to token ids if they are long.

Nothing here needs the engine or PyTorch, so that children can read long bodies (`octavo.server.reading`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from octavo.engine.prompt_reader import TokenIds
from octavo.errors import PromptError
from octavo.sampling_params import SamplingParams
from octavo.server.api.body import decode
from octavo.server.api.prompt_tokens import Prompts, Reading
from octavo.server.api.sampling import Defaults, chat_params, completion_params
from octavo.server.api.structs import MAX_PROMPTS, ChatRequest, CompletionRequest, SamplingFields
from octavo.server.api.tools.toolbox import Toolbox
from octavo.server.api_errors import ApiError, refused
from octavo.server.parsing.formats import ModelFormats

_MAX_COMPLETIONS = 1024
_SHORT_CHARS = 256

Answered = tuple[bytes, tuple[str, ...]]
"""An answer that needs nothing but its body, and the fields that were left out of that."""


@dataclass(frozen=True, slots=True)
class Materials:
    """Everything about the model that is needed to read bodies.

    Attributes:
        model: the name that clients give.
        prompts: renders and tokenizes.
        formats: how the model writes calls and reasoning.
        defaults: its default sampling parameters.
    """

    model: str
    prompts: Prompts
    formats: ModelFormats
    defaults: Defaults


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A body that asks for a chat.

    Attributes:
        fields: the body, in the terms of its route; only what the answer needs if the body is long.
        chat: as a chat; likewise.
        params: how to answer, without what tools ask for.
        left_out: fields that were taken and have no effect.
        prepared: the prompt, the tools, and the parameters constrained to them; None if `chat` still has
            them.
    """

    fields: Struct
    chat: ChatRequest
    params: SamplingParams
    left_out: tuple[str, ...] = ()
    prepared: tuple[TokenIds, Toolbox, SamplingParams] | None = None


@dataclass(frozen=True, slots=True)
class TextInput:
    """A body that asks for completions of texts.

    Attributes:
        fields: the body; only what the answer needs if it is long.
        params: how to continue.
        left_out: as in ChatInput.
        prompts: token ids; None if `fields` still holds the prompts.
    """

    fields: CompletionRequest
    params: SamplingParams
    left_out: tuple[str, ...] = ()
    prompts: list[TokenIds] | None = None


def check_model(fields: str | None, model: str) -> None:
    """Refuse a model name that is not ours.

    Raises:
        ApiError: 404.
    """
    # Ollama's clients may add this tag.
    if fields is not None and fields not in (model, f"{model}:latest"):
        text = f"there is no model {fields[:200]!r} here, only {model!r}"
        raise ApiError(404, text, param="model", code="model_not_found")


def parse_chat(body: bytes, defaults: Defaults) -> ChatInput:
    """Decode a body of /v1/chat/completions.

    Raises:
        ApiError, SamplingParamsError: as `decode` and `chat_params`.
    """
    chat, left_out = decode(body, ChatRequest)
    return ChatInput(chat, chat, chat_params(chat, defaults), left_out)


def parse_completion(body: bytes, defaults: Defaults) -> TextInput:
    """Decode a body of /v1/completions.

    Raises:
        ApiError, SamplingParamsError: as `decode` and `completion_params`; there are too many completions.
        PromptError: there are too many prompts.
    """
    fields, left_out = decode(body, CompletionRequest)
    found = TextInput(fields, completion_params(fields, defaults), left_out)
    num = num_prompts(found)
    if num > MAX_PROMPTS:
        raise PromptError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {num}")
    if num * found.params.n > _MAX_COMPLETIONS:
        raise refused(
            "n", f"times the number of prompts must be at most {_MAX_COMPLETIONS}, got {num} prompts"
        )
    return found


def num_prompts(found: TextInput) -> int:
    """Return how many prompts a body holds, before they are read."""
    prompt = found.fields.prompt if found.prompts is None else found.prompts
    return 1 if isinstance(prompt, str) or isinstance(next(iter(prompt), None), int) else len(prompt)


def reading_of(fields: SamplingFields) -> Reading:
    """Return how a request wants its prompts read."""
    return Reading(
        fields.add_special_tokens, fields.truncate_prompt_tokens, fields.truncation_side == "right"
    )


def is_soon_read(fields: CompletionRequest) -> bool:
    """Return whether reading prompts takes less time than a change of threads."""
    prompt = fields.prompt
    return len(prompt) <= _SHORT_CHARS if isinstance(prompt, str) else str not in map(type, prompt[:1])


def read_texts(prompts: Prompts, found: TextInput) -> Sequence[TokenIds]:
    """Read the prompts of a completion, which may take long.

    Raises:
        PromptError, RequestTooLongError: as Prompts.read_all.
    """
    return prompts.read_all(found.fields.prompt, reading_of(found.fields))
