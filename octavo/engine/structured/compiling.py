"""Compiles grammars that strangers wrote: within limits of size, memory and time."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from octavo.engine.structured.in_time import InTime
from octavo.engine.structured.matcher import Grammar, first_line
from octavo.engine.structured.schemas import held_schema
from octavo.errors import StructuredOutputError
from octavo.sampling_params import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Between JSON's tokens, room for indentation. Weak models would write spaces for ever.
_WHITESPACE = r"[ \t\r\n]{1,40}"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Compiler:
    """Compiles grammars for one vocabulary. Any thread may use it."""

    def __init__(self, vocabulary: "LLTokenizer") -> None:
        self._vocabulary = vocabulary
        self._in_time = InTime()

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar and find its first mask, which costs the most.

        Raises:
            StructuredOutputError: it is malformed, too costly, or matches nothing.
        """
        eos_token_ids = frozenset(self._vocabulary.eos_tokens)
        return Grammar(self._in_time.call(lambda: self._pristine(structured)), eos_token_ids)

    def _pristine(self, structured: StructuredOutput) -> "LLMatcher":
        from llguidance import LLMatcher

        source = grammar_source(structured)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise StructuredOutputError(f"{structured.kind} cannot be used: {first_line(matcher)}")
        return matcher


def grammar_source(structured: StructuredOutput) -> str:
    """Return a structured output as llguidance's description of a grammar."""
    from llguidance import LLMatcher

    if structured.json_object or structured.json_schema is not None:
        schema = _ANY_OBJECT if structured.json_object else json.loads(str(structured.json_schema))
        if schema is False:
            raise StructuredOutputError("json_schema cannot be used: false allows no value")
        held = held_schema({} if schema is True else schema, {"whitespace_pattern": _WHITESPACE})
        return LLMatcher.grammar_from_json_schema(json.dumps(held, ensure_ascii=False))
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return LLMatcher.grammar_from_regex(choice_regex(structured.choice))
    assert structured.grammar is not None
    return LLMatcher.grammar_from_lark(structured.grammar)


def choice_regex(texts: Iterable[str]) -> str:
    """Return a regex that matches one of these texts."""
    return "|".join(map(_literal, texts))


def _literal(text: str) -> str:
    """Return a regex that matches this text alone."""
    plain = [character.isascii() and character.isalnum() for character in text]
    return "".join(c if is_plain else f"\\x{{{ord(c):x}}}" for c, is_plain in zip(text, plain, strict=True))


def _limits() -> "LLParserLimits":
    """Bound what a grammar costs: a step at most some 100 ms, its lexer some 50 MB."""
    from llguidance import LLParserLimits

    # The first mask may take the square of the lexer's fuel, and a part of that holds the interpreter's lock:
    # 0.8 and 0.2 s for `a{1000000000}` with five times this fuel. No usual grammar of 64 KiB needs half.
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=10_000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
