"""Reads a body of /v1/decisions into token ids. Nothing here needs the engine: children read long bodies."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from octavo.engine.decisions import (
    DEFAULT_CHOICES,
    MAX_CHOICES,
    Question,
    SharedInput,
    read_input,
    read_question,
)
from octavo.errors import PromptError, RequestTooLongError
from octavo.server.api.body import decode
from octavo.server.api.prompt_tokens import Reading
from octavo.server.api.structs import MAX_MESSAGES, JsonObject, Priority, RequestId, Salt, Usage
from octavo.server.api_errors import ApiError, refused
from octavo.server.reading.requests import Materials, check_model

MAX_QUESTIONS = 1024
MAX_SCORES = 8192

Choices = Annotated[list[str], Meta(min_length=2, max_length=MAX_CHOICES)]


class QuestionFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """A question with choices of its own."""

    text: str
    choices: Choices | None = None


class DecisionsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/decisions.

    Attributes:
        input: a text, or messages of a conversation.
        questions: texts, or objects with a text and choices.
        choices: those of questions that have none of their own; yes and no.
        instructions: the text of a system message before the input.
        raw: the questions continue the input's text as they are; the chat template is not used.
        chat_template_kwargs: further variables of the template.
        length_normalized: compare means of log-probabilities over a choice's tokens, not sums.
        return_token_ids: add the ids that were scored after.
    """

    input: str | Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]
    questions: Annotated[list[str | QuestionFields], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    choices: Choices | None = None
    instructions: str | None = None
    raw: bool = False
    chat_template_kwargs: JsonObject | None = None
    length_normalized: bool = False
    return_token_ids: bool = False
    model: str | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None


class Decision(Struct, kw_only=True):
    """The answer to one question; a choice is named by its text.

    Attributes:
        logprobs: sums over a choice's tokens, or means if they were asked for.
        token_ids: the question's, which follow those of the input.
    """

    index: int
    choice: str
    probabilities: dict[str, float]
    logprobs: dict[str, float]
    token_ids: list[int] | UnsetType = UNSET


class Decisions(Struct, kw_only=True):
    """Answer of POST /v1/decisions.

    Attributes:
        usage: each choice counts with all tokens before it, most of which are cached.
        prompt_token_ids: those of the input, which all questions share.
    """

    id: str
    object: str = "decisions"
    created: int
    model: str
    decisions: list[Decision]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class Asked(Struct, array_like=True):
    """A question as ids that follow the input's, and the ids of each of its choices."""

    choices: list[str]
    token_ids: list[int]
    choice_ids: list[list[int]]


class Forest(Struct, array_like=True):
    """Everything to be scored: a body without its texts, the ids of its input, and its questions."""

    fields: DecisionsRequest
    shared: list[int]
    questions: list[Asked]


def read_decisions(materials: Materials, body: bytes) -> bytes:
    """Read a body into a Forest, as msgpack. This may take long.

    Raises:
        ApiError, ChatTemplateError, RequestTooLongError: it is malformed, or too long.
    """
    fields = decode(body, DecisionsRequest)
    check_model(fields.model, materials.model)
    questions = [_question(item, fields) for item in fields.questions]
    if sum(len(question.choices) for question in questions) > MAX_SCORES:
        raise refused("questions", f"may have {MAX_SCORES} choices in all; send fewer questions at a time")
    shared = _read_input(materials, fields)
    asked = [_asked(materials, shared, index, question) for index, question in enumerate(questions)]
    kept = structs.replace(fields, input="", questions=[""], instructions=None, chat_template_kwargs=None)
    return msgspec.msgpack.encode(Forest(kept, shared.token_ids.listed, asked))


def _question(item: str | QuestionFields, fields: DecisionsRequest) -> Question:
    given = QuestionFields(text=item) if isinstance(item, str) else item
    return Question(given.text, given.choices or fields.choices or DEFAULT_CHOICES)


def _read_input(materials: Materials, fields: DecisionsRequest) -> SharedInput:
    given = fields.input
    contents = [given] if isinstance(given, str) else [message.get("content") for message in given]
    materials.prompts.check_size("".join(text for text in contents if isinstance(text, str)), Reading())
    variables = fields.chat_template_kwargs
    try:
        return read_input(
            materials.prompts.reader,
            given,
            instructions=fields.instructions,
            raw=fields.raw,
            variables=variables,
        )
    except PromptError as error:
        raise _about("input", error) from error


def _asked(materials: Materials, shared: SharedInput, index: int, question: Question) -> Asked:
    try:
        read = read_question(materials.prompts.reader, shared, question)
    except PromptError as error:
        raise _about(f"questions[{index}]", error) from error
    choice_ids = [choice.listed for choice in read.choices]
    return Asked([*question.choices], read.token_ids.listed, choice_ids)


def _about(field: str, error: PromptError) -> Exception:
    """Name the field that an error is about."""
    return (
        error if isinstance(error, RequestTooLongError) else ApiError(400, f"{field}: {error}", param=field)
    )
