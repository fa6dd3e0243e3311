"""A compiled grammar, and matchers that follow outputs through it.

llguidance raises nothing for what users or models do wrong: a matcher that cannot go on stays in error, and is
asked after every call. Imports no torch: requests hold matchers.
"""

from typing import TYPE_CHECKING

from octavo.errors import StructuredOutputError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# All matchers of a grammar share one lexer, whose states are limited and never forgotten. It is replaced, for
# requests that come later, after so many tokens: a hostile grammar makes some twenty states of each.
_MAX_TOKENS = 5000


class Grammar:
    """What an output must be. Any thread may make matchers of it.

    Attributes:
        eos_token_ids: tokens that masks allow where an output may end.
        num_tokens: tokens that its matchers took.
    """

    def __init__(self, pristine: "LLMatcher", eos_token_ids: frozenset[int]) -> None:
        """Wrap a matcher that took no token yet."""
        self._pristine = pristine
        self.eos_token_ids = eos_token_ids
        self.num_tokens = 0

    @property
    def is_worn(self) -> bool:
        """Its lexer may be close to its limits: compile it again for new requests."""
        return self.num_tokens >= _MAX_TOKENS

    def matcher(self) -> "Matcher":
        """Return a matcher at the beginning."""
        return Matcher(self, self._pristine.deep_copy())


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
        self.grammar.num_tokens += 1
        self.raw.consume_token(token_id)
        if not self.raw.is_error():
            return None
        return StructuredOutputError(f"the output cannot follow its grammar: {first_line(self.raw)}")

    @property
    def is_complete(self) -> bool:
        """Nothing but EOS can follow."""
        return self.raw.is_stopped()


def first_line(raw: "LLMatcher") -> str:
    """Return what is wrong with a matcher, in one line of limited length."""
    lines = raw.get_error().splitlines() or ["unknown error"]
    return lines[0][:500]
