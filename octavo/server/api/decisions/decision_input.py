"""Reads a body of /v1/decisions into token ids. Nothing here needs the engine: children read long bodies."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from octavo.engine.decisions import DEFAULT_CHOICES, Question, SharedInput, read_input, read_question
from octavo.errors import PromptError, RequestTooLongError
from octavo.server.api.body import decode
from octavo.server.api.decisions.decision_structs import (
    MAX_SCORES,
    ChoiceFields,
    DecisionsRequest,
    QuestionFields,
)
from octavo.server.api.prompt_tokens import Reading
from octavo.server.api.responses.response_input import chat_of
from octavo.server.api.responses.response_structs import ResponsesRequest
from octavo.server.api.structs import JsonObject
from octavo.server.api_errors import ApiError, refused
from octavo.server.reading.requests import Answered, Materials, check_model

# What stands between instructions and the list of choices. A predicate's choices are in the sentence.
_ASK = {
    "predicate": "Is this true? Answer yes or no.",
    "choice": "Answer with one of these:",
    "score": "Answer with one of these levels, from the lowest to the highest:",
}


class Asked(Struct, array_like=True):
    """A question as ids that follow the input's, and the ids of each of its choices.

    Attributes:
        kind: what its answer is like.
        values: the choices as the client gave them.
    """

    kind: Literal["predicate", "choice", "score"]
    name: str | None
    values: list[str | bool]
    token_ids: list[int]
    choice_ids: list[list[int]]


class Forest(Struct, array_like=True):
    """Everything to be scored: a body without its texts, the ids of its input, and its questions."""

    fields: DecisionsRequest
    shared: list[int]
    questions: list[Asked]


def read_decisions(materials: Materials, body: bytes) -> Answered:
    """Read a body into a Forest, as msgpack. This may take long.

    Raises:
        ApiError, ChatTemplateError, RequestTooLongError: it is malformed, or too long.
    """
    fields, left_out = decode(body, DecisionsRequest)
    check_model(fields.model, materials.model)
    given = [QuestionFields(text=one) if isinstance(one, str) else one for one in fields.questions]
    listed = [_choices(one, fields, f"questions[{index}]") for index, one in enumerate(given)]
    if sum(map(len, listed)) > MAX_SCORES:
        raise refused("questions", f"may have {MAX_SCORES} choices in all; send fewer questions at a time")
    if fields.choices and not any(one.text is not None and one.choices is None for one in given):
        raise refused("choices", "are those of questions that are texts without choices; there is none")
    shared = _read_input(materials, fields)
    asked = [
        _asked(materials, shared, one, choices, f"questions[{index}]")
        for index, (one, choices) in enumerate(zip(given, listed, strict=True))
    ]
    kept = structs.replace(
        fields, input="", questions=[""], choices=None, instructions=None, chat_template_kwargs=None
    )
    return msgspec.msgpack.encode(Forest(kept, shared.token_ids.listed, asked)), left_out


def _choices(one: QuestionFields, fields: DecisionsRequest, where: str) -> list[ChoiceFields]:
    """Return a question's choices.

    Raises:
        ApiError: its fields contradict each other.
    """
    if (one.text is None) == (one.instructions is None) or (one.type is None) != (one.instructions is None):
        raise _refused(where, "needs a text, or a type with instructions")
    if (one.choices is not None) > (one.type in (None, "choice")) or (one.type == "choice") > bool(
        one.choices
    ):
        raise _refused(where, "has choices if its type is choice, and may have them with a text")
    if (one.levels is None) == (one.type == "score"):
        raise _refused(where, "has levels if its type is score, and only then")
    if one.levels is not None:
        return [ChoiceFields(value=level.label, description=level.description) for level in one.levels]
    given = one.choices or (fields.choices if one.type is None else None) or DEFAULT_CHOICES
    listed = [ChoiceFields(value=choice) if isinstance(choice, str) else choice for choice in given]
    if one.type is None and any(choice.description for choice in listed):
        raise _refused(where, "has a text, to which no description of a choice is added: write it there")
    return listed


def _label(choice: ChoiceFields) -> str:
    return choice.value if isinstance(choice.value, str) else str(choice.value).lower()


def _text(one: QuestionFields, choices: Sequence[ChoiceFields], where: str) -> str:
    """Return what is asked; with a type, the choices are listed."""
    if one.type is None or one.instructions is None:
        return one.text or ""
    given = one.instructions
    parts = given if isinstance(given, str) else _joined(given, f"{where}.instructions")
    if not parts.strip():
        raise _refused(where, "needs instructions that are not empty")
    lines = [f"{parts}\n\n{_ASK[one.type]}"]
    for choice in () if one.type == "predicate" else choices:
        about = f": {choice.description}" if choice.description else ""
        lines.append(f"- {_label(choice)}{about}")
    return "\n".join(lines)


def _joined(parts: Sequence[JsonObject], where: str) -> str:
    found = []
    for index, part in enumerate(_with_json(parts, where)):
        if part.get("type") != "input_text" or not isinstance(part.get("text"), str):
            text = f"{where}[{index}]: expected a part of type input_text or input_json"
            raise ApiError(400, text, param=f"{where}[{index}]")
        found.append(part["text"])
    return "\n".join(found)


def _with_json(parts: Sequence[Any], where: str) -> list[Any]:
    """Return parts with JSON written as text.

    Raises:
        ApiError: a part has no data, or data that is neither an object nor a list.
    """
    found = []
    for index, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") == "input_json":
            data = part.get("data")
            if not isinstance(data, dict | list):
                text = f"{where}[{index}].data: expected an object or a list"
                raise ApiError(400, text, param=f"{where}[{index}]")
            part = {"type": "input_text", "text": msgspec.json.encode(data).decode()}
        found.append(part)
    return found


def _read_input(materials: Materials, fields: DecisionsRequest) -> SharedInput:
    given = fields.input
    if not isinstance(given, str):
        given = chat_of(
            ResponsesRequest(input=[_item(item, index) for index, item in enumerate(given)])
        ).messages
    contents = [given] if isinstance(given, str) else [message.get("content") for message in given]
    materials.prompts.check_size("".join(text for text in contents if isinstance(text, str)), Reading())
    try:
        return read_input(
            materials.prompts.reader,
            given,
            instructions=fields.instructions,
            raw=fields.raw,
            variables=fields.chat_template_kwargs,
        )
    except PromptError as error:
        raise _about("input", error) from error


def _item(item: JsonObject, index: int) -> JsonObject:
    """Return an item with JSON in its parts written as text."""
    place = "output" if "output" in item else "content"
    parts = item.get(place)
    return {**item, place: _with_json(parts, f"input[{index}].{place}")} if isinstance(parts, list) else item


def _asked(
    materials: Materials,
    shared: SharedInput,
    one: QuestionFields,
    choices: Sequence[ChoiceFields],
    where: str,
) -> Asked:
    question = Question(_text(one, choices, where), [_label(choice) for choice in choices])
    try:
        read = read_question(materials.prompts.reader, shared, question)
    except PromptError as error:
        raise _about(where, error) from error
    values = [choice.value for choice in choices]
    choice_ids = [choice.listed for choice in read.choices]
    return Asked(one.type or "choice", one.name, values, read.token_ids.listed, choice_ids)


def _refused(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where} {why}", param=where)


def _about(field: str, error: PromptError) -> Exception:
    """Name the field that an error is about."""
    return (
        error if isinstance(error, RequestTooLongError) else ApiError(400, f"{field}: {error}", param=field)
    )
