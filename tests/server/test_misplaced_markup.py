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
from octavo.server.parsing.call_formats import LLAMA, MISTRAL, MISTRAL_LIST, QWEN3_CODER, CallFormat, hermes

FORMS: dict[str, CallFormat] = {
    "hermes": hermes(), "llama3_json": LLAMA, "mistral": MISTRAL, "mistral-list": MISTRAL_LIST,
    "qwen3_coder": QWEN3_CODER,
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


def xml(calls: Sequence[Call], line: str) -> Pieces:
    """Calls in Qwen3-Coder's form, with line feeds between tags or without."""
    pieces: Pieces = []
    for number, (name, arguments) in enumerate(calls):
        pieces += [(line, False)] if number else []
        pieces += [("<tool_call>", True), (line, False), (f"<function={name}>", True), (line, False)]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            pieces += [(f"<parameter={key}>", True), (f"{line}{text}{line}", False), ("</parameter>", True)]
            pieces += [(line, False)]
        pieces += [("</function>", True), (line, False), ("</tool_call>", True)]
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
        if pieces[one][0] != "</parameter>" or not is_parameter(pieces[other]):
            yield [piece for index, piece in enumerate(pieces) if index not in (one, other)]


def is_parameter(piece: tuple[str, bool]) -> bool:
    return piece[0].startswith("<parameter=")


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


def wrong(form: CallFormat, text: str, meant: Sequence[Call]) -> str:
    """Say what is wrong with what is read; nothing: it is right."""
    content, calls = read(form, [text])
    left, found = counted(meant), counted([(name, json.loads(arguments)) for name, arguments in calls])
    if found - left:
        return f"a call that was not meant: {dict(found - left)}"
    lost = [value for value in values(left - found) if value not in content]
    twice = [value for value in values(found) if value in content]
    return f"lost: {lost}, twice: {twice}" if lost or twice else ""


def variants(name: str, calls: Sequence[Call]) -> Iterator[Pieces]:
    """An answer in pieces, mangled: in XML one of its calls, with line feeds between tags and without."""
    if name != "qwen3_coder":
        yield from mangled(outer(FORMS[name], calls))
        return
    for line in ("", "\n"):
        parts = [xml([call], line) for call in calls]
        for index, part in enumerate(parts):
            for changed in mangled(part):
                yield [piece for one in (*parts[:index], changed, *parts[index + 1 :]) for piece in one]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FORMS)
def test_mangled_markup_gives_no_wrong_value(name: str, conversation: str) -> None:
    form, meant = FORMS[name], CONVERSATIONS[conversation]
    texts = {"".join(text for text, _ in pieces) for pieces in variants(name, meant)}
    assert len(texts) > 20
    for text in texts:
        assert not wrong(form, text, meant), (text, wrong(form, text, meant))
        size = 1 + len(text) % 5
        chunks = [text[begin : begin + size] for begin in range(0, len(text), size)]
        assert read(form, chunks) == read(form, [text]), text


NESTED: Call = ("find", {"o": {"a": [1, {"k": "v"}], "b": {"c": "x"}}, "city": "Rome", "d": [[], {}]})


@pytest.mark.parametrize("name", [name for name in FORMS if name != "qwen3_coder"])
def test_a_lost_or_doubled_mark_of_json_gives_no_wrong_value(name: str) -> None:
    form, meant = FORMS[name], [NESTED, NOW]
    text = form.written(meant)
    for place, character in enumerate(text):
        if character in '{}[],:"':
            for changed in (text[:place] + text[place + 1 :], text[:place] + character + text[place:]):
                assert not counted([(n, json.loads(a)) for n, a in read(form, [changed])[1]]) - counted(meant)
                assert read(form, changed) == read(form, [changed])
