"""Marks: requests whose prompts begin alike have the same first marks."""

import asyncio
import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv import KVCacheManager
from octavo.router import Ledger, Marks, marks_of
from octavo.router.marks import DIGEST_BYTES, MAX_MARKS, read_marks

SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 40}


def marks(holder: bytes = b"", **fields: object) -> Marks:
    return marks_of(json.dumps(fields).encode(), holder)


def num_common(one: Marks, other: Marks) -> int:
    pairs = zip(one.digests, other.digests, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one.ends), len(other.ends)))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_chats_share_their_first_messages_and_turns_extend_one_another() -> None:
    one, other = (marks(messages=[SYSTEM, user(text)]) for text in ("Why?", "How?"))
    # 1,196 bytes in steps of 256, and the message of the user.
    assert len(one.ends) == 6
    assert num_common(one, other) == 5
    reply = {"role": "assistant", "content": "Because."}
    later = marks(messages=[SYSTEM, user("Why?"), reply, user("Really?")])
    assert later.digests[: len(one.digests)] == one.digests
    assert one.ends[-1] == one.num_bytes < later.ends[-1]


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "mine"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_what_changes_the_prompt_or_its_salt_changes_every_mark(fields: dict) -> None:
    plain = marks(messages=[SYSTEM])
    assert num_common(plain, marks(messages=[SYSTEM], **fields)) == 0
    assert num_common(plain, marks(messages=[SYSTEM], temperature=0.5, max_tokens=3)) == len(plain.ends)


def test_holders_have_no_mark_in_common() -> None:
    assert num_common(marks(b"a", prompt="x" * 999), marks(b"b", prompt="x" * 999)) == 0


def test_texts_ids_and_lists_of_them() -> None:
    text = "lorem ipsum " * 50
    assert marks(prompt=text) == marks(prompt=[text, "another"])
    ids = list(range(300))
    assert marks(prompt=ids) == marks(prompt=[ids, [5]])
    # Four bytes each: a mark every 64 ids.
    assert marks(prompt=ids).ends == (256, 512, 768, 1024, 1200)
    assert num_common(marks(prompt=ids), marks(prompt=[*ids[:130], 7, *ids[131:]])) == 2
    assert marks(input="hello", instructions="Be brief.").num_bytes > 5


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"prompt":null}', b'{"prompt":""}', b'{"prompt":[]}', b'{"messages":[]}',
     b'{"prompt":[[]]}', b'{"prompt":[1,"x"]}', b'{"prompt":[99999999999]}', b'{"prompt":5}', b"\xff",
     b'{"prompt":[1.5]}', b'{"messages":{}}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_prompt_has_no_marks(body: bytes) -> None:
    assert marks_of(body) == Marks()


@given(st.binary(max_size=200))
def test_any_bytes_are_read(data: bytes) -> None:
    assert isinstance(marks_of(data), Marks)
    assert isinstance(Marks.from_header(data), Marks)


@given(st.text(max_size=3000), st.text(max_size=300), st.text(max_size=300))
def test_common_beginnings_have_common_marks(begin: str, one: str, other: str) -> None:
    first, second = marks(prompt=begin + one), marks(prompt=begin + other)
    whole = sum(end <= len(begin.encode()) and end % 256 == 0 for end in first.ends)
    assert num_common(first, second) >= whole


def test_a_header_carries_them_and_they_are_few() -> None:
    found = marks(prompt="x" * 5_000_000)
    assert len(found.digests) <= MAX_MARKS
    assert Marks.from_header(found.to_header().encode()) == found
    assert len(found.to_header()) < 12 << 10


def test_a_ledger_tells_what_is_in_the_tree_and_forgets_what_left_it() -> None:
    manager, ledger = KVCacheManager(64, 4), Ledger()
    prompt = array("i", range(256))
    found = marks(prompt=list(prompt))
    ledger.note(found, prompt, b"salt", 4)
    tree = manager.store.tree
    # The prompt waits for its prefill: its marks are not told yet, and not forgotten.
    assert ledger.cached_marks(tree.has_digest) == (b"", ())
    assert len(ledger) == len(found.digests)
    sequence = manager.new_sequence(b"salt")
    manager.match_prefix(sequence, prompt, 255)
    assert manager.allocate(sequence, 256)
    manager.commit(sequence, prompt, 256)
    digests, tokens = ledger.cached_marks(tree.has_digest)
    assert sorted(tokens) == [64, 128, 192, 256]
    # The shortest is used last, so it is forgotten last.
    assert digests[-DIGEST_BYTES:] == found.digests[0]
    manager.free(sequence)
    manager.reset()
    assert ledger.cached_marks(manager.store.tree.has_digest) == (b"", ())
    assert len(ledger) == 0


def test_ten_thousand_prompts_leave_a_ledger_bounded() -> None:
    ledger = Ledger(max_marks=500)
    shared = [1] * 64
    for number in range(10_000):
        prompt = [*shared, *[number] * 64]
        ledger.note(marks(prompt=prompt), array("i", prompt), b"", 16)
    assert len(ledger) == 500
    digests, _ = ledger.cached_marks(lambda block: True)
    assert marks(prompt=shared).digests[0] in digests


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/decisions", "/api/chat"])
def test_every_route_with_a_prompt_has_marks(path: str) -> None:
    """Turns of a conversation go to the replica that has its beginning, in whichever API they come."""
    name = "input" if path == "/v1/decisions" else "messages"
    body = json.dumps({name: [{"role": "user", "content": "Hi " * 2000}]}).encode()
    assert asyncio.run(read_marks(path, [], body, isolates=False)).digests
