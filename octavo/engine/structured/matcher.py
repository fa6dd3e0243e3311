"""A compiled grammar, and matchers that follow outputs through it.

llguidance raises nothing for what users or models do wrong: a matcher that cannot go on stays in error, and
is asked after every call. Imports no torch: requests hold matchers.
"""

from typing import TYPE_CHECKING

from octavo.errors import StructuredOutputError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# All matchers of a grammar share one lexer, whose states are limited and never forgotten. Requests that come
# later get a new one after this many tokens; hardly any grammar makes twenty states of each.
_MAX_TOKENS = 5000


class Grammar:
    """What an output must be. Any thread may make matchers of it.

    Attributes:
        eos_token_ids: tokens that masks allow where an output may end.
        is_worn: its lexer may be close to its limits: new requests should not share it.
    """

    def __init__(self, pristine: "LLMatcher", eos_token_ids: frozenset[int]) -> None:
        """Wrap a matcher that took no token yet."""
        self._pristine = pristine
        self.eos_token_ids = eos_token_ids
        self.is_worn = False
        self._num_tokens = 0

    def matcher(self) -> "Matcher":
        """Return a matcher at the beginning."""
        return Matcher(self, self._pristine.deep_copy())

    def note(self, *, is_error: bool) -> None:
        """Count a token that a matcher took, or failed to take."""
        self._num_tokens += 1
        if is_error or self._num_tokens >= _MAX_TOKENS:
            self.is_worn = True


class Matcher:
    """Follows one completion through its grammar. For one thread at a time.

    Attributes:
        grammar: its grammar.
        raw: llguidance's matcher. Once in error it stays there.
    """

    __slots__ = ("grammar", "raw")

    def __init__(self, grammar: Grammar, raw: "LLMatcher") -> None:
        self.grammar = grammar
        self.raw = raw

    def accept(self, token_id: int) -> StructuredOutputError | None:
        """Take the next token; return what is wrong with it, or with the matcher since its last mask."""
        self.raw.consume_token(token_id)
        is_error = self.raw.is_error()
        self.grammar.note(is_error=is_error)
        if not is_error:
            return None
        return StructuredOutputError(f"the output cannot follow its grammar: {first_line(self.raw)}")

    @property
    def is_complete(self) -> bool:
        """Whether nothing but EOS can follow."""
        return self.raw.is_stopped()


def first_line(raw: "LLMatcher") -> str:
    """Return what is wrong with a matcher, in one line of limited length."""
    lines = raw.get_error().splitlines() or ["unknown error"]
    return lines[0][:500]
