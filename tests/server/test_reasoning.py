"""Reasoning is divided from content, however the text is cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.parsing.answer import AnswerReader, ReasoningReader, read_answer
from octavo.server.parsing.formats import hermes

THINK = ("<think>", "</think>")


def read(text: str, has_begun: bool = False) -> tuple[str, str]:
    answer = read_answer(AnswerReader(ReasoningReader(*THINK, has_begun=has_begun), None), text)
    return answer.reasoning, answer.content


@pytest.mark.parametrize(
    ("text", "has_begun", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
        ("\n<think>Hm.</think>Yes.", False, ("Hm.", "Yes.")),
        ("Hm.\n</think>\n\nYes.\n", True, ("Hm.", "Yes.\n")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("<think>never ends", False, ("never ends", "")),
        ("never ends </thi", True, ("never ends </thi", "")),
        ("  Yes.", False, ("", "  Yes.")),
        ("Write <think>x</think>", False, ("", "Write <think>x</think>")),
        ("<thin", False, ("", "<thin")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("a < b </thin </think>c", True, ("a < b </thin", "c")),
        ("", False, ("", "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning(text: str, has_begun: bool, expected: tuple[str, str]) -> None:
    assert read(text, has_begun) == expected


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "nk>", " ", "\n", "a", "😀", "<", "/"]), max_size=8
    ),
    has_begun=st.booleans(),
    data=st.data(),
)
def test_any_chunking_gives_the_same(parts: list[str], has_begun: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    reader = ReasoningReader(*THINK, has_begun=has_begun)
    pieces = [
        piece
        for begin, end in itertools.pairwise([0, *cuts, len(text)])
        for piece in reader.feed(text[begin:end])
    ]
    pieces += reader.finish()
    found = tuple("".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content"))
    assert found == read(text, has_begun)
    kept = "".join(found).replace(" ", "").replace("\n", "")
    written = text.replace(" ", "").replace("\n", "")
    assert len(written) - len(kept) in (0, *(len(one) for one in THINK), len("".join(THINK)))


def test_calls_inside_reasoning_are_none() -> None:
    call = hermes().written([("f", {})])
    reader = AnswerReader(ReasoningReader(*THINK, has_begun=True), hermes().new_reader({"f"}))
    answer = read_answer(reader, f"Maybe {call}?</think>{call}")
    assert answer.reasoning == f"Maybe {call}?"
    assert len(answer.calls) == 1
    assert answer.content == ""
