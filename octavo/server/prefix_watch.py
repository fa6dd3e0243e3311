"""Notices a long conversation whose turns no longer begin alike, which ends its use of the prefix cache."""

import logging
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from octavo.engine.prompt_reader import TokenIds
from octavo.tokenizer import Tokenizer

_MIN_TOKENS = 512
_MAX_PROMPTS, _MAX_TOKENS = 64, 1 << 22
_MAX_HASHED = 1 << 16
_MAX_WARNED = 1024
# So many tokens make one shingle; a prompt is known by one in 32 of its shingles, wherever they stand.
_SHINGLE_TOKENS = 8
_FEWER_BITS = 64 - 5
# A prompt with at least so many of another's shingles is the same conversation.
_LIKE = 0.7
# The last words before what asks for an answer; an agent's other conversations have the same tools.
_END = slice(-32, -16)
_EXCERPT_TOKENS = 16
logger = logging.getLogger("octavo.server")


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A prompt that was seen: whose it is, its tokens [T], and hashes that tell what it is about."""

    client: Hashable
    token_ids: np.ndarray
    shingles: np.ndarray

    def num_common(self, other: "_Prompt") -> int:
        """Return how many leading tokens are equal."""
        length = min(len(self.token_ids), len(other.token_ids))
        differs = self.token_ids[:length] != other.token_ids[:length]
        return int(differs.argmax()) if differs.any() else length

    def is_in(self, other: "_Prompt") -> bool:
        """Return whether another one goes on with it: most of it is somewhere there, and so is its end."""
        shared = np.isin(self.shingles, other.shingles)
        is_like = len(shared) > 0 and float(shared.mean()) >= _LIKE
        return is_like and self.token_ids[_END].tobytes() in other.token_ids.tobytes()


class PrefixWatch:
    """Compares each long prompt with the last ones of its client, and warns of each client once.

    Call it from one thread. What it keeps is bounded, in numbers of prompts and of clients.

    Args:
        tokenizer: for excerpts; None: the log gets numbers and never a text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._prompts: deque[_Prompt] = deque()
        self._warned: OrderedDict[Hashable, None] = OrderedDict()

    def note(self, client: Hashable, prompt: TokenIds) -> None:
        """Look at a prompt that is about to be answered."""
        if len(prompt.listed) < _MIN_TOKENS or client in self._warned:
            return
        token_ids = np.frombuffer(prompt.packed, np.int32)
        new = _Prompt(client, token_ids, _shingles(token_ids[:_MAX_HASHED]))
        earlier = [old for old in self._prompts if old.client == client]
        before = max(earlier, key=new.num_common, default=None)
        if before is not None and 2 * new.num_common(before) < len(before.token_ids):
            # It does not go on with any of them; it may be one that has changed.
            before = next((old for old in reversed(earlier) if old.is_in(new)), None)
            if before is not None:
                self._warn(before, new)
        if before is not None:
            self._prompts.remove(before)
        self._prompts.append(new)
        while len(self._prompts) > _MAX_PROMPTS or sum(p.token_ids.size for p in self._prompts) > _MAX_TOKENS:
            self._prompts.popleft()

    def _warn(self, before: _Prompt, new: _Prompt) -> None:
        self._warned[new.client] = None
        if len(self._warned) > _MAX_WARNED:
            self._warned.popitem(last=False)
        at = new.num_common(before)
        logger.warning(
            f"a conversation stopped hitting the prefix cache: of the {len(before.token_ids)} tokens of its "
            f"turn before, {at} begin this turn, which differs from token {at} on"
            f"{self._excerpt(before, new, at)}; this client is not watched any more"
        )

    def _excerpt(self, before: _Prompt, new: _Prompt, at: int) -> str:
        if self._tokenizer is None:
            return " (--log-prompt-excerpts shows its words)"
        spans = (
            new.token_ids[max(0, at - _EXCERPT_TOKENS) : at],
            before.token_ids[at : at + _EXCERPT_TOKENS],
            new.token_ids[at : at + _EXCERPT_TOKENS],
        )
        texts = [self._tokenizer.decode(span.tolist(), skip_special_tokens=False) for span in spans]
        return ": after {!r} came {!r}, now {!r}".format(*texts)


def _shingles(token_ids: np.ndarray) -> np.ndarray:
    """Return the hashes of a sample of all runs of tokens; equal runs are in it or not wherever they are."""
    length = len(token_ids) - _SHINGLE_TOKENS + 1
    hashes = np.zeros(length, np.uint64)
    for offset in range(_SHINGLE_TOKENS):
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        hashes += token_ids[offset : offset + length].astype(np.uint64)
    return np.unique(hashes[hashes >> np.uint64(_FEWER_BITS) == 0])
