"""Compiles one grammar within limits of size, time and memory."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from octavo.engine.structured.grammar import Grammar, first_line
from octavo.errors import StructuredOutputError
from octavo.sampling_params import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Result = TypeVar("Result")

DEADLINE_S = 2.0
"""A grammar that takes longer to compile is refused."""
# Compilers walk chains of references by recursion: 64 KiB of grammar fit some 8,000 links, of 10 KB each.
# Memory of a stack that is not used costs nothing.
_STACK_BYTES = 256 * 2**20
_MAX_COMPILING = 4
# Between JSON's tokens, room for indentation. Weak models would write spaces for ever.
_WHITESPACE = r"[ \t\r\n]{1,40}"
_ANY_OBJECT = '{"type": "object"}'


class Compiler:
    """Compiles grammars in threads of their own, a few at a time.

    No limit of llguidance is one of time, and a thread cannot be stopped. A grammar that is too late is
    refused, and keeps its place until it is done.
    """

    def __init__(self, vocabulary: "LLTokenizer") -> None:
        self._vocabulary = vocabulary
        self._places = threading.BoundedSemaphore(_MAX_COMPILING)

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar and find its first mask, which costs the most.

        Raises:
            StructuredOutputError: it is malformed, too costly, or matches nothing.
        """
        return self._in_time(
            lambda: Grammar(self._pristine(structured), frozenset(self._vocabulary.eos_tokens))
        )

    def _pristine(self, structured: StructuredOutput) -> "LLMatcher":
        from llguidance import LLMatcher

        source = grammar_source(structured)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise StructuredOutputError(f"{structured.kind} cannot be used: {first_line(matcher)}")
        return matcher

    def _in_time(self, act: Callable[[], Result]) -> Result:
        """Call a function in a thread with a large stack; give up at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        if not self._places.acquire(timeout=DEADLINE_S):
            raise StructuredOutputError("too many grammars are being compiled; try again later")
        results: list[Result | BaseException] = []

        def run() -> None:
            try:
                results.append(act())
            except BaseException as error:
                results.append(error)
            finally:
                self._places.release()

        thread = _start(run, self._places)
        thread.join(max(0.0, deadline - time.monotonic()))
        if not results:
            raise StructuredOutputError(
                f"the grammar takes more than {DEADLINE_S:g} s to compile; make it smaller"
            )
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]


# threading.stack_size is of the whole process.
_STACK_SIZE = threading.Lock()


def _start(run: Callable[[], None], places: threading.BoundedSemaphore) -> threading.Thread:
    thread = threading.Thread(target=run, name="octavo-grammar", daemon=True)
    try:
        with _STACK_SIZE:
            before = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
    except RuntimeError as error:
        places.release()
        raise StructuredOutputError(f"no thread for compiling a grammar: {error}") from error
    return thread


def grammar_source(structured: StructuredOutput) -> str:
    """Return a structured output as llguidance's description of a grammar."""
    from llguidance import LLMatcher

    if structured.json_object or structured.json_schema is not None:
        schema = _ANY_OBJECT if structured.json_object else str(structured.json_schema)
        return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _WHITESPACE})
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, structured.choice)))
    assert structured.grammar is not None
    return LLMatcher.grammar_from_lark(structured.grammar)


def _literal(text: str) -> str:
    """Return a regex that matches this text alone."""
    plain = [character.isascii() and character.isalnum() for character in text]
    return "".join(c if is_plain else f"\\x{{{ord(c):x}}}" for c, is_plain in zip(text, plain, strict=True))


def _limits() -> "LLParserLimits":
    """Bound what a grammar costs: a step at most some 100 ms, its lexer some 50 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=10_000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
