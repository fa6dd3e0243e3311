"""Normalises the arguments of `LLM` to lists: one prompt or many, one set of parameters or one per prompt."""

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from octavo.engine.decisions import Question
from octavo.errors import InvalidArgumentError, PromptError
from octavo.sampling_params import SamplingParams

Message = Mapping[str, object]
Item = TypeVar("Item")


def as_params_list(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """Return one SamplingParams per prompt.

    Raises:
        InvalidArgumentError: `params` is of the wrong type, or there is not one for each prompt.
    """
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise InvalidArgumentError(
            f"params must be SamplingParams or a list of them, got {type(params).__name__}; "
            "SamplingParams.from_dict reads a mapping"
        )
    params_list = list(params)
    if len(params_list) != num_prompts:
        raise InvalidArgumentError(
            f"params must be one SamplingParams or one per prompt, got {len(params_list)} "
            f"for {num_prompts} prompts"
        )
    return params_list


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return one conversation or several as a list.

    Raises:
        PromptError: it is neither, or there is no message.
    """
    if isinstance(messages, str | bytes | bytearray | memoryview) or not isinstance(messages, Sequence):
        raise PromptError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise PromptError("messages must hold at least one message, got none")
    if isinstance(messages[0], Mapping):
        return [cast(Sequence[Message], messages)]
    return list(cast(Sequence[Sequence[Message]], messages))


def as_continuation_list(continuations: Sequence[str | Sequence[int]]) -> list[str | Sequence[int]]:
    """Return continuations as a list.

    Raises:
        PromptError: `continuations` is one string, or not a list.
    """
    return _as_list(continuations, "continuations must be a list of texts or token id lists")


def as_questions(questions: Sequence[str | Question]) -> list[str | Question]:
    """Return questions as a list.

    Raises:
        PromptError: `questions` is one string, or not a list.
    """
    return _as_list(questions, "questions must be a list of texts or Questions")


def _as_list(given: Sequence[Item], expected: str) -> list[Item]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray | memoryview):
        got = "one string" if isinstance(given, str) else type(given).__name__
        raise PromptError(f"{expected}, got {got}")
    return list(given)
