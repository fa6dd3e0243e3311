"""Marks: digests of ever longer prefixes of a request's prompt.

    {"messages": [{system}, {user}]}  ->  salt ─ [256 bytes] ─ [256 bytes] ─ [rest of {system}] ─ [{user}]
                                                  mark 0        mark 1        mark 2               mark 3

Prompts with a common prefix share their first marks. The router compares text, not tokens, so it needs
neither a tokenizer nor a chat template. Only the replica tokenizes, so it alone maps marks to tokens
(ledger.py).
"""

import asyncio
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
"""Header that carries marks from the router to a replica."""
CLIENT_HEADER = b"x-octavo-client"
"""Header that tells a replica a client's address. Clients cannot send it."""

# Longer bodies are parsed in another thread.
_INLINE_BYTES = 1 << 18
# (up to this offset in a segment, bytes between two marks): longer texts get coarser marks.
_STEPS = ((1 << 13, 1 << 8), (1 << 16, 1 << 10), (1 << 62, 1 << 13))
# Fields that change the whole prompt or its cache namespace. They go into the first digest.
_NAMESPACE = ("cache_salt", "chat_template_kwargs", "add_special_tokens", "reasoning_effort", "reasoning")
_FIRST = ("tools", "system", "instructions")
_PROMPTS = ("messages", "input", "prompt")


class Marks(msgspec.Struct, frozen=True, array_like=True):
    """Marks of one prompt, shortest prefix first.

    Attributes:
        digests: [M] each covers the namespace and all bytes up to its end.
        ends: [M] bytes up to each mark, ascending.
        num_bytes: length of the whole prompt.
    """

    digests: tuple[bytes, ...] = ()
    ends: tuple[int, ...] = ()
    num_bytes: int = 0

    def to_header(self) -> str:
        """Return the value of HEADER, at most 12 KiB."""
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def from_header(cls, value: bytes) -> "Marks":
        """Decode what `to_header` wrote. Any other value gives no marks."""
        try:
            found = msgspec.msgpack.decode(base64.b64decode(value, validate=True), type=cls)
        except (binascii.Error, msgspec.DecodeError):
            return cls()
        return found if len(found.digests) == len(found.ends) else cls()


async def read_marks(
    path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, isolates: bool
) -> Marks:
    """Return the marks of a request; no marks if it carries no prompt for the model.

    Args:
        path, headers, body: those of the request; names of headers in lower case.
        isolates: requests with different API keys never share a mark.
    """
    if not body or not path.startswith(("/v1/", "/api/")) or path.endswith("/count_tokens"):
        return Marks()
    holder = _holder_of(headers) if isolates else b""
    if len(body) > _INLINE_BYTES:
        return await asyncio.to_thread(marks_of, body, holder)
    return marks_of(body, holder)


def _holder_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a digest of the API key of a request, from either header that may carry it."""
    sent = dict(headers)
    return blake2b(sent.get(b"authorization") or sent.get(b"x-api-key", b""), digest_size=32).digest()


def marks_of(body: bytes, holder: bytes = b"") -> Marks:
    """Return the marks of the prompt in a request's body; no marks if there is none.

    Args:
        body: JSON of a chat, a response, or a completion (text or token ids; only the first of several
            prompts counts).
        holder: isolates prefixes: requests of different holders never share a mark.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        segments = [bytes(fields[name]) for name in _FIRST if name in fields]
        for name in _PROMPTS:
            if name in fields:
                segments += _segments(bytes(fields[name]))
                break
    except (msgspec.MsgspecError, UnicodeError, RecursionError, struct.error):
        # The replica reports what is wrong with the body.
        return Marks()
    namespace = [bytes(fields.get(name, b"")) for name in _NAMESPACE]
    return _mark(segments, b"\0".join((holder, *namespace)))


def _segments(prompt: bytes) -> list[bytes]:
    """Split a prompt: one segment for each message, UTF-8 for text, 32-bit integers for token ids."""
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
