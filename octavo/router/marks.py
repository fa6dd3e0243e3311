"""From the body of a request to marks: digests that stand for ever longer beginnings of its prompt.

    {"messages": [{system}, {user}]}  ->  salt ─ [256 bytes] ─ [256 bytes] ─ [rest of {system}] ─ [{user}]
                                                  mark 0        mark 1        mark 2               mark 3

Requests whose prompts begin alike have the same first marks, as far as they are alike. A router compares
texts, not tokens: it needs neither a tokenizer nor a chat template, and the replica alone tokenizes. Which
tokens a mark stands for is known where they are computed; see ledger.py.
"""

import base64
import binascii
import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice

import msgspec

MAX_MARKS = 512
DIGEST_BYTES = 8
HEADER = b"x-octavo-marks"
"""Carries the marks of a request from the router to a replica."""

# (up to this offset in a segment, a mark every so many bytes): the longer, the coarser.
_STEPS = ((1 << 13, 1 << 8), (1 << 16, 1 << 10), (1 << 62, 1 << 13))
# Fields that a template writes before the messages, or that change the prompt or its place in the cache.
_NAMESPACE = ("cache_salt", "chat_template_kwargs", "add_special_tokens", "reasoning_effort", "reasoning")
_FIRST = ("tools", "system", "instructions")
_PROMPTS = ("messages", "input", "prompt")


class Marks(msgspec.Struct, frozen=True, array_like=True):
    """The beginnings of one prompt, shortest first.

    Attributes:
        digests: [M] each stands for all bytes up to its end, and for the namespace.
        ends: [M] bytes up to each mark, ascending.
        num_bytes: of the whole prompt.
    """

    digests: tuple[bytes, ...] = ()
    ends: tuple[int, ...] = ()
    num_bytes: int = 0

    def to_header(self) -> str:
        """Return them as the value of HEADER, at most 12 KiB."""
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def from_header(cls, value: bytes) -> "Marks":
        """Read what `to_header` wrote; any other value has no marks."""
        try:
            found = msgspec.msgpack.decode(base64.b64decode(value, validate=True), type=cls)
        except (binascii.Error, msgspec.DecodeError):
            return cls()
        return found if len(found.digests) == len(found.ends) else cls()


def is_prompt(path: str) -> bool:
    """Return whether what is posted to a path is a prompt that a model will read."""
    return path.startswith("/v1/") and not path.endswith("/count_tokens")


def holder_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a digest of the key that a request was sent with, by either of its headers."""
    sent = dict(headers)
    return blake2b(sent.get(b"authorization") or sent.get(b"x-api-key", b""), digest_size=32).digest()


def marks_of(body: bytes, holder: bytes = b"") -> Marks:
    """Return the marks of a request's prompt; none if there is no prompt in it.

    Args:
        body: JSON: a chat, a completion (text or token ids; of several prompts the first one counts), or a
            response.
        holder: whose prefixes these are; requests of different holders have no mark in common.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        segments = [bytes(fields[name]) for name in _FIRST if name in fields]
        for name in _PROMPTS:
            if name in fields:
                segments += _segments(bytes(fields[name]))
                break
    except (msgspec.MsgspecError, UnicodeError, RecursionError, struct.error):
        # The replica will say what is wrong with the body.
        return Marks()
    namespace = [bytes(fields.get(name, b"")) for name in _NAMESPACE]
    return _mark(segments, b"\0".join((holder, *namespace)))


def _segments(prompt: bytes) -> list[bytes]:
    """Return a prompt's parts: messages one by one, a text as UTF-8, token ids as 32-bit integers."""
    if not prompt.startswith(b"["):
        value = msgspec.json.decode(prompt)
        return [value.encode("utf-8", "surrogatepass")] if isinstance(value, str) and value else []
    items = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    if not items:
        return []
    first = bytes(items[0])
    if first.startswith(b"{"):
        return [bytes(item) for item in items]
    if first.startswith((b"[", b'"')):
        return _segments(first)
    token_ids = msgspec.json.decode(prompt, type=list[int])
    return [struct.pack(f"{len(token_ids)}i", *token_ids)]


def _mark(segments: Iterable[bytes], namespace: bytes) -> Marks:
    state = blake2b(blake2b(namespace).digest(), digest_size=DIGEST_BYTES)
    digests, ends, before = [], [], 0
    pieces = ((segment, begin, end) for segment in segments for begin, end in _cuts(len(segment)))
    for segment, begin, end in islice(pieces, MAX_MARKS):
        state.update(segment[begin:end])
        digests.append(state.copy().digest())
        before += end - begin
        ends.append(before)
    return Marks(tuple(digests), tuple(ends), sum(map(len, segments)))


def _cuts(length: int) -> Iterator[tuple[int, int]]:
    begin = 0
    for until, step in _STEPS:
        while begin < min(length, until):
            end = min(begin + step, length)
            yield begin, end
            begin = end
