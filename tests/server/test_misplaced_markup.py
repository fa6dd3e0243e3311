"""A call with missing, doubled or misplaced markup is read right or is content: no value is ever wrong.

Right calls of every form are written in pieces. Then pieces of markup are left out, written twice, moved or
swapped. What is read must be calls that were meant, each at most once and with all its arguments; and the
values of a call that is not read stand in the content, those of one that is read do not.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from call_pieces import outcome

from octavo.server.parsing.answer import AnswerReader
from octavo.server.parsing.call_formats import (
    GLM45,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_LIST,
    QWEN3_CODER,
    CallFormat,
    XmlFormat,
    hermes,
)

FORMS: dict[str, CallFormat] = {
    "hermes": hermes(), "llama3_json": LLAMA, "mistral": MISTRAL, "mistral-list": MISTRAL_LIST,
    "qwen3_coder": QWEN3_CODER, "glm45": GLM45, "minimax": MINIMAX,
}  # fmt: skip
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
FUNCTIONS = [
    ("find", {"type": "object", "properties": {"city": TEXT, "days": NUMBER, "unit": TEXT}}),
    ("now", {"type": "object", "properties": {}}),
    ("run", {"type": "object", "properties": {"city": TEXT, "any": {}}}),
]
Call = tuple[str, dict[str, object]]
# Values that are in no other value, so that one sees where each of them went.
ROME: Call = ("find", {"city": "Rome", "days": 31, "unit": "Kelvin"})
OSLO: Call = ("find", {"city": "Oslo"})
NOW: Call = ("now", {})
LIMA: Call = ("run", {"city": "Lima", "any": "words"})
CONVERSATIONS = {
    "one": [ROME], "bare": [NOW], "same": [ROME, OSLO], "then-bare": [LIMA, NOW], "bare-then": [NOW, ROME],
    "other": [ROME, LIMA], "short": [OSLO, LIMA],
}  # fmt: skip
MARKS = re.compile(
    r'(</?tool_call>|\[TOOL_CALLS\]|\[ARGS\]|; |, (?={"name)|{"name": |"(?:arguments|parameters)": |}|\])'
)
Pieces = list[tuple[str, bool]]
"""Texts of an answer, and whether each is markup."""


def xml(form: XmlFormat, calls: Sequence[Call], line: str) -> Pieces:
    """Calls in a form of XML, with line feeds between tags or without."""
    pieces: Pieces = []
    tags = form.tags
    around = line if tags.around else ""
    for number, (name, arguments) in enumerate(calls):
        pieces += [(line, False)] if number else []
        if tags.function:
            pieces += [(tags.call, True), (line, False)]
        pieces += [(f"{tags.function or tags.call}{name}{tags.end_name}", True), (line, False)]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            pieces += [(f"{tags.parameter}{key}{tags.end_keys[0 if line else -1]}", True)]
            pieces += [(f"{around}{text}{around}", False), (tags.end_parameter, True), (line, False)]
        pieces += [(tags.end_function, True), (line, False)] if tags.function else []
        pieces += [(tags.end_call, True)]
    return pieces


def outer(form: CallFormat, calls: Sequence[Call]) -> Pieces:
    """Calls in a form whose arguments are JSON; the outermost braces and brackets are markup, too."""
    parts = MARKS.split(form.written(calls))
    return [(part, bool(index % 2)) for index, part in enumerate(parts) if part]


def mangled(pieces: Pieces) -> Iterator[Pieces]:
    """Every way to leave out, to write twice, to move or to swap markup of one call."""
    marks = [index for index, (_, is_markup) in enumerate(pieces) if is_markup]
    for index in marks:
        rest = pieces[:index] + pieces[index + 1 :]
        yield rest
        yield [*pieces[:index], pieces[index], *pieces[index:]]
        for place in range(len(rest) + 1):
            yield [*rest[:place], pieces[index], *rest[place:]]
    for one, other in itertools.combinations(marks, 2):
        swapped = list(pieces)
        swapped[one], swapped[other] = pieces[other], pieces[one]
        # Parameters whose names are swapped are another right call.
        if not (is_parameter(pieces[one]) and is_parameter(pieces[other])):
            yield swapped
        # Without the tags between two values they are one.
        if pieces[one][0] not in ("</parameter>", "</arg_value>") or not is_parameter(pieces[other]):
            yield [piece for index, piece in enumerate(pieces) if index not in (one, other)]


def is_parameter(piece: tuple[str, bool]) -> bool:
    return piece[0].startswith(("<parameter", "<arg_key>"))


def read(form: CallFormat, chunks: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = AnswerReader(None, form.reader(FUNCTIONS))
    return outcome([piece for chunk in chunks for piece in reader.feed(chunk)] + reader.finish())


def counted(calls: Sequence[Call]) -> Counter[tuple[str, str]]:
    """Calls by name and arguments; white space around a text is no markup, and may have moved with it."""
    return Counter(
        (name, json.dumps({key: plain(value) for key, value in arguments.items()}))
        for name, arguments in calls
    )


def plain(value: object) -> object:
    return value.strip() if isinstance(value, str) else value


def values(calls: Counter[tuple[str, str]]) -> list[str]:
    return [
        str(value)
        for (_, arguments), number in calls.items()
        if number
        for value in json.loads(arguments).values()
    ]


def arguments_of(calls: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each argument as a call of its own."""
    return [
        (name, json.dumps({key: value}))
        for name, arguments in calls
        for key, value in json.loads(arguments).items()
    ]


def wrong(form: CallFormat, text: str, meant: Sequence[Call]) -> str:
    """Say what is wrong with what is read; nothing: it is right."""
    content, calls = read(form, [text])
    left, found = counted(meant), counted([(name, json.loads(arguments)) for name, arguments in calls])
    if isinstance(form, XmlFormat) and not form.tags.function:
        # The one end tag may stand anywhere between arguments: those after it are content.
        found, left = (Counter(dict.fromkeys(arguments_of(each), 9)) for each in (found, left))
    if found - left:
        return f"a call that was not meant: {dict(found - left)}"
    lost = [value for value in values(left - found) if value not in content]
    twice = [value for value in values(found) if value in content]
    return f"lost: {lost}, twice: {twice}" if lost or twice else ""


def variants(name: str, calls: Sequence[Call]) -> Iterator[Pieces]:
    """An answer in pieces, mangled: in XML one of its calls, with line feeds between tags and without."""
    form = FORMS[name]
    if not isinstance(form, XmlFormat):
        yield from mangled(outer(form, calls))
        return
    for line in ("", "\n"):
        parts = [xml(form, [call], line) for call in calls]
        for index, part in enumerate(parts):
            for changed in mangled(part):
                yield [piece for one in (*parts[:index], changed, *parts[index + 1 :]) for piece in one]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FORMS)
def test_mangled_markup_gives_no_wrong_value(name: str, conversation: str) -> None:
    form, meant = FORMS[name], CONVERSATIONS[conversation]
    texts = {"".join(text for text, _ in pieces) for pieces in variants(name, meant)}
    assert len(texts) > 15
    for text in texts:
        assert not wrong(form, text, meant), (text, wrong(form, text, meant))
        size = 1 + len(text) % 5
        chunks = [text[begin : begin + size] for begin in range(0, len(text), size)]
        assert read(form, chunks) == read(form, [text]), text


NESTED: Call = ("find", {"o": {"a": [1, {"k": "v"}], "b": {"c": "x"}}, "city": "Rome", "d": [[], {}]})


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not isinstance(form, XmlFormat)])
def test_a_lost_or_doubled_mark_of_json_gives_no_wrong_value(name: str) -> None:
    form, meant = FORMS[name], [NESTED, NOW]
    text = form.written(meant)
    for place, character in enumerate(text):
        if character in '{}[],:"':
            for changed in (text[:place] + text[place + 1 :], text[:place] + character + text[place:]):
                assert not counted([(n, json.loads(a)) for n, a in read(form, [changed])[1]]) - counted(meant)
                assert read(form, changed) == read(form, [changed])
