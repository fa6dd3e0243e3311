"""Answers in harmony: only special tokens are markup, and no order of tokens is an error."""

import itertools
import json
import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_harmony import PIECES, write_harmony_model

from octavo.server.parsing.answer import Answer, read_answer
from octavo.server.parsing.formats import formats_of
from octavo.server.parsing.harmony import harmony_of, open_channel
from octavo.server.parsing.harmony_reader import HarmonyReader
from octavo.server.parsing.piece import Piece
from octavo.tokenizer import Tokenizer

START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL = PIECES
ENDS = (RETURN, CALL, "<|endoftext|>")
TEXTS = [
    "{test1,test2}", "}{", '"', '\\"', "\\", "'", "<|call|>", "<|channel|>final<|message|>", "</tool_call>",
    "😀", "👩‍🚀", "é", "北京", "\n", "\t", "\x00", "\u2028", "]", "[", ",", ":", "", " to=functions.g ",
    "<|end|><|start|>assistant", "a" * 300, '{"a": [1, {"b": "}"}]}', "analysis", "commentary",
]  # fmt: skip
ADVERSARIAL = list(dict.fromkeys(first + second for first, second in itertools.product(TEXTS, repeat=2)))[
    ::3
][:200]
F = (CHANNEL, "commentary to=functions.f ", CONSTRAIN, "json", MESSAGE)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_harmony_model(tmp_path_factory.mktemp("harmony")))


def ids_of(tokenizer: Tokenizer, parts: Iterable[str]) -> list[int]:
    """Ids of texts and special tokens; a text is never a special token, though it may look like one."""
    special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
    ids = []
    for part in parts:
        if part in special:
            ids.append(special[part])
        else:
            # The tiny vocabulary has a token for each byte, from id 3 on, as GPT-2 orders them.
            ids += [byte_ids(tokenizer)[byte] for byte in part.encode()]
    return ids


def byte_ids(tokenizer: Tokenizer, known: dict[int, dict[int, int]] = {}) -> dict[int, int]:  # noqa: B006
    if id(tokenizer) not in known:
        single = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
        known[id(tokenizer)] = {byte: single[bytes([byte])] for byte in range(256)}
    return known[id(tokenizer)]


def reader(tokenizer: Tokenizer, **options: object) -> HarmonyReader:
    harmony = harmony_of(tokenizer)
    assert harmony is not None
    return HarmonyReader(harmony, **{"names": frozenset({"f", "g"}), **options})  # type: ignore[arg-type]


def written(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of an answer as the engine gives it: without that of the token that ended it."""
    ends = ids_of(tokenizer, ENDS)
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids, skip_special_tokens=False)


def whole(tokenizer: Tokenizer, parts: Iterable[str], **options: object) -> Answer:
    ids = ids_of(tokenizer, parts)
    answer = read_answer(reader(tokenizer, **options), written(tokenizer, ids), ids)
    for call in answer.calls:
        call.id = ""
    return answer


def streamed(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], lag: int = 0) -> list[Piece]:
    """Read an answer whose tokens come in parts, and whose text lags some characters behind."""
    text, one, told, pieces = written(tokenizer, ids), reader(tokenizer), 0, []
    decoder = tokenizer.incremental_decoder(skip_special_tokens=False)
    length = 0
    for begin, end in itertools.pairwise([0, *cuts, len(ids)]):
        length += len(decoder.push(ids[begin:end]))
        released = max(told, min(length, len(text)) - lag) if end < len(ids) else len(text)
        pieces += one.feed(text[told:released], ids[begin:end])
        told = released
    return pieces + one.finish()


def outcome(pieces: Iterable[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    content, reasoning, calls, parts = "", "", [], []
    for piece in pieces:
        if piece.kind in ("content", "broken"):
            content += piece.text
        elif piece.kind == "reasoning":
            reasoning += piece.text
        elif piece.kind == "complete":
            calls.append((parts[0], "".join(parts[1:])))
        else:
            parts = [piece.text] if piece.kind == "call" else [*parts, piece.text]
    return content, reasoning, calls


def test_channels_become_reasoning_content_and_calls(tokenizer: Tokenizer) -> None:
    thought = (CHANNEL, "analysis", MESSAGE, "Hm <|call|> 😀.", END, START, "assistant")
    answer = whole(tokenizer, (*thought, CHANNEL, "final", MESSAGE, "Yes\n", RETURN))
    assert (answer.reasoning, answer.content, answer.calls) == ("Hm <|call|> 😀.", "Yes\n", [])
    preamble = (CHANNEL, "commentary", MESSAGE, "I look.", END, START, "assistant")
    answer = whole(tokenizer, (*thought, *preamble, *F, '{"a": 1}', CALL))
    assert (answer.reasoning, answer.content) == ("Hm <|call|> 😀.", "I look.")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}')]
    answer = whole(tokenizer, (*thought, *preamble, *preamble, *thought, *thought))
    assert answer.content == "I look.\nI look."
    assert answer.reasoning.count("\n") == 2


@pytest.mark.parametrize(
    "header",
    [
        (CHANNEL, "commentary to=functions.f ", CONSTRAIN, "json"),
        (CHANNEL, "commentary to=functions.f json"),
        (CHANNEL, "commentary to=functions.f"),
        (" to=functions.f", CHANNEL, "commentary ", CONSTRAIN, "json"),
        (START, "assistant to=functions.f", CHANNEL, "commentary json"),
        (CHANNEL, "analysis to=functions.f code"),
        (CHANNEL, "commentary", CONSTRAIN, "json to=functions.f"),
    ],
)
def test_all_ways_to_head_a_call(tokenizer: Tokenizer, header: tuple[str, ...]) -> None:
    for arguments in ('{"a": {}}', ' {"a": {}} '):
        answer = whole(tokenizer, (*header, MESSAGE, arguments, CALL))
        assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": {}}')]
        assert (answer.content, answer.reasoning) == ("", "")
    assert whole(tokenizer, (*header, MESSAGE, CALL)).calls[0].arguments == "{}"
    # Without tools it is text.
    answer = whole(tokenizer, (*header, MESSAGE, "{}", CALL), names=frozenset())
    assert answer.content + answer.reasoning == "{}"


THOUGHT = ("", "x", [])
SAID = ("x", "", [])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), ("", "", [])),
        (("x",), SAID),
        (("x", RETURN), SAID),
        (("to",), ("to", "", [])),
        (("to be or not",), ("to be or not", "", [])),
        (("assistants are",), ("assistants are", "", [])),
        ((MESSAGE, "x", END), SAID),
        ((CHANNEL,), ("", "", [])),
        ((CHANNEL, "fin"), ("", "", [])),
        ((CHANNEL, "final", RETURN), ("", "", [])),
        ((CHANNEL, "The answer is four.", RETURN), ("The answer is four.", "", [])),
        ((CHANNEL, "Four.", RETURN), ("Four.", "", [])),
        ((CHANNEL, "final\nx"), ("final\nx", "", [])),
        ((CHANNEL, "a" * 300), ("a" * 300, "", [])),
        # A token where another one was expected, as other servers stumble over.
        ((CHANNEL, "final", MESSAGE, "x", END, CONSTRAIN, "json", MESSAGE, "y"), ("x\ny", "", [])),
        ((CONSTRAIN, MESSAGE, "x"), SAID),
        ((END, END, START, START, CHANNEL, CHANNEL, "analysis", MESSAGE, MESSAGE, "x"), THOUGHT),
        ((CHANNEL, "analysis", MESSAGE, "x", START, "assistant", CHANNEL, "final"), THOUGHT),
        ((CHANNEL, "analysis", MESSAGE, "x", CHANNEL, "final", MESSAGE, "y"), ("y", "x", [])),
        ((CHANNEL, "analysis", MESSAGE, "x", END, "and more text"), ("and more text", "x", [])),
        ((CHANNEL, "final", MESSAGE, "x", CONSTRAIN, MESSAGE, "<|im_end|>", "y"), ("xy", "", [])),
        ((CHANNEL, "other", MESSAGE, "x"), SAID),
        ((START, "user", MESSAGE, "x"), SAID),
        ((CHANNEL, "commentary to=browser.search", MESSAGE, "x"), SAID),
        ((CHANNEL, "analysis to=python code", MESSAGE, "x"), THOUGHT),
        ((CHANNEL, "commentary to=functions.", MESSAGE, "x"), SAID),
        ((*F, "x", CALL), SAID),
        ((*F, " x", CALL), SAID),
        ((*F, '{"a": 1'), ('{"a": 1', "", [])),
        ((*F, '{"a": }', CALL), ('{"a": }', "", [])),
        ((*F, '{"a": 1', CHANNEL, "final", MESSAGE, "x"), ('{"a": 1\nx', "", [])),
        ((*F, "{} x", CALL), ("x", "", [("f", "{}")])),
        ((*F, "{}", END, START, "assistant", *F, "{}", CALL), ("", "", [("f", "{}")] * 2)),
        ((*F, "{}", START, START, *F[:3]), ("", "", [("f", "{}")])),
        ((*F,), ("", "", [])),
    ],
)  # fmt: skip
def test_whatever_comes_is_an_answer(tokenizer: Tokenizer, parts: tuple[str, ...], expected: tuple) -> None:
    answer = whole(tokenizer, parts)
    found = [(call.name, call.arguments) for call in answer.calls]
    assert (answer.content, answer.reasoning, found) == expected
    ids = ids_of(tokenizer, parts)
    for lag in (0, 1, 7):
        assert outcome(streamed(tokenizer, ids, range(1, len(ids)), lag)) == expected


MEANT = ("f", '{"city": "Rome", "o": {"days": 31}}')
SAID_BEFORE = (CHANNEL, "analysis", MESSAGE, "Hm", END, START, "assistant")
WRITTEN = {
    "call": (*F, MEANT[1], CALL),
    "thought": (*SAID_BEFORE, *F, MEANT[1], CALL),
    "start": (
        START,
        "assistant to=functions.f",
        CHANNEL,
        "commentary ",
        CONSTRAIN,
        "json",
        MESSAGE,
        MEANT[1],
        CALL,
    ),
    "glued": (CHANNEL, "commentary to=functions.f", CONSTRAIN, "json", MESSAGE, MEANT[1], CALL),
    "answered": (*F, MEANT[1], CALL, START, "assistant", CHANNEL, "final", MESSAGE, "Yes", RETURN),
}


def mangled(parts: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Every way to leave out, to write twice, to move or to swap special tokens, into texts, too."""
    marks = [index for index, part in enumerate(parts) if part in PIECES]
    for index in marks:
        rest = (*parts[:index], *parts[index + 1 :])
        yield rest
        yield (*parts[:index], parts[index], *parts[index:])
        for place, part in enumerate(rest):
            for inside in {0, len(part) // 2, len(part) - 8} if part not in PIECES else {0}:
                halves = [half for half in (part[: max(inside, 0)], part[max(inside, 0) :]) if half]
                middle = [*halves[:1], parts[index], *halves[1:]] if inside > 0 else [parts[index], part]
                yield (*rest[:place], *middle, *rest[place + 1 :])
    for one, other in itertools.combinations(marks, 2):
        swapped = list(parts)
        swapped[one], swapped[other] = parts[other], parts[one]
        yield tuple(swapped)
        yield tuple(part for index, part in enumerate(parts) if index not in (one, other))


@pytest.mark.parametrize("name", WRITTEN)
def test_mangled_markup_gives_no_wrong_value(tokenizer: Tokenizer, name: str) -> None:
    """A call is the one that was meant, or its arguments are text; nothing is lost or comes twice."""
    for parts in set(mangled(WRITTEN[name])):
        answer = whole(tokenizer, parts)
        found = [(call.name, call.arguments) for call in answer.calls]
        text = answer.content + answer.reasoning
        assert found in ([], [MEANT]), parts
        for word in ("Rome", "31"):
            assert (word in text.replace("\n", "")) == (not found), (parts, answer)
        ids = ids_of(tokenizer, parts)
        streams = outcome(streamed(tokenizer, ids, range(1, len(ids))))
        assert streams == (answer.content, answer.reasoning, found), parts


def test_there_are_200_adversarial_texts() -> None:
    assert len(set(ADVERSARIAL)) == 200


@pytest.mark.parametrize("num_cuts", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_streamed_is_whole_byte_for_byte_at_every_cut(tokenizer: Tokenizer, num_cuts: int) -> None:
    for number, text in enumerate(ADVERSARIAL):
        arguments = json.dumps({"cmd": text, text: [text, {"x": text}]}, ensure_ascii=False)
        thought = (CHANNEL, "analysis", MESSAGE, text, END, START, "assistant")
        ids = ids_of(tokenizer, (*thought, *F, arguments, CALL))
        expected = ("", text, [("f", arguments)])
        assert outcome(streamed(tokenizer, ids, ())) == expected
        assert outcome(streamed(tokenizer, ids, range(1, len(ids)), lag=number % 4)) == expected
        step = 1 + len(ids) // num_cuts
        for cut in range(1 + number % step, len(ids), step):
            assert outcome(streamed(tokenizer, ids, (cut,), lag=number % 3)) == expected


parts = st.lists(st.sampled_from([*PIECES, "<|im_end|>", "{", '"a": 1}', "😀", *TEXTS]), max_size=14)


@settings(max_examples=60, deadline=None)
@given(parts=parts, lag=st.integers(0, 9), data=st.data())
def test_any_tokens_in_any_cuts_give_the_same(
    tokenizer: Tokenizer, parts: list[str], lag: int, data: st.DataObject
) -> None:
    ids = ids_of(tokenizer, parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    expected = outcome(streamed(tokenizer, ids, ()))
    assert outcome(streamed(tokenizer, ids, cuts, lag)) == expected
    assert outcome(streamed(tokenizer, ids, range(1, len(ids)), lag)) == expected
    answer = whole(tokenizer, parts)
    found = [(call.name, call.arguments) for call in answer.calls]
    assert (answer.content, answer.reasoning, found) == expected


UNITS = [
    PIECES, (CHANNEL,), (CHANNEL, "final", MESSAGE, "x", END), (*F, "{}", CALL), (*F, "{"), (END, "x"),
    (MESSAGE, " "), ("{",), (CONSTRAIN, "a"),
]  # fmt: skip


@pytest.mark.parametrize("opened", [(), F, (*F, '{"a": "'), (CHANNEL, "final", MESSAGE)])
def test_time_is_linear_in_tokens(tokenizer: Tokenizer, opened: tuple[str, ...]) -> None:
    """Ten times the tokens take some ten times as long, whole or one by one; quadratic would be a hundred."""
    for unit in UNITS:
        for size in (10**9, 1):
            begun, more = ids_of(tokenizer, opened), ids_of(tokenizer, unit)
            ratios = (_ratio(tokenizer, begun, more, size) for _ in range(4))
            assert any(ratio < 30 for ratio in ratios), (opened, unit, size)


def _ratio(tokenizer: Tokenizer, opened: list[int], unit: list[int], size: int) -> float:
    seconds = []
    for num_tokens in (400, 4_000):
        ids = (opened + unit * num_tokens)[:num_tokens]
        begun = time.process_time()
        streamed(tokenizer, ids, range(size, len(ids), size))
        seconds.append(time.process_time() - begun)
    # What is shorter than the clock's own noise is nothing.
    return seconds[1] / max(seconds[0], 5e-4)


def test_options_and_what_a_prompt_leaves_open(tokenizer: Tokenizer) -> None:
    final = f"<|start|>user<|message|>Hi<|end|>{START}assistant{CHANNEL}final{MESSAGE}Yes"
    assert open_channel(final) == "final"
    assert open_channel(f"{final}<|end|>{START}assistant") is None
    assert open_channel("") is None
    assert whole(tokenizer, ("x", RETURN), channel="final").content == "x"
    assert whole(tokenizer, ("x", RETURN), channel="analysis").reasoning == "x"
    thought = (CHANNEL, "analysis", MESSAGE, "x")
    assert whole(tokenizer, thought, shows_reasoning=False).content == "x"
    found = formats_of(tokenizer, "auto", "auto")
    assert found.can_call
    assert found.calls is None
    for chosen in (("none", "auto"), ("auto", "none"), ("harmony", "harmony")):
        use = formats_of(tokenizer, *chosen).harmony
        assert use is not None
        assert (use.calls, use.reasoning) == (chosen[0] != "none", chosen[1] != "none")
    assert formats_of(tokenizer, "none", "none").harmony is None
    assert formats_of(tokenizer, "hermes", "auto").harmony is None


def test_a_message_ends_no_answer(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == frozenset(ids_of(tokenizer, ENDS))


def test_half_a_special_token_that_a_stop_string_left_is_no_text(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, (CHANNEL, "final", MESSAGE, "x", END))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    for length in range(len(text), len(text) - len(END), -1):
        assert read_answer(reader(tokenizer), text[:length], ids).content == "x"
