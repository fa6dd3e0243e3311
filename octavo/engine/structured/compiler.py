"""Compiles grammars that strangers wrote, within limits of size, memory and time; keeps the latest ones."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from octavo.engine.structured.matcher import Grammar, first_line
from octavo.engine.structured.schemas import strict_schema
from octavo.errors import ConfigError, StructuredOutputError
from octavo.install_hint import install_extra
from octavo.sampling_params import SamplingParams, StructuredOutput
from octavo.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Result = TypeVar("Result")

DEADLINE_S = 2.0
"""A grammar that takes longer to compile is refused."""
MAX_RUNNING = 4
# Compilers walk chains of references by recursion, and a process dies if its stack ends: 64 KiB of grammar
# fit some 8,000 links of 10 KB each. Memory of a stack that is not used costs nothing.
_STACK_BYTES = 256 * 2**20
# The size of new threads' stacks is the whole process's.
_STACK_SIZE = threading.Lock()


class _Job(Generic[Result]):
    """One call that may take too long.

    Attributes:
        outcome: the result or the error, once there is one. Code in Rust may panic, which is no Exception.
        is_running: it got a place.
        is_given_up: nobody waits any more.
    """

    def __init__(self, act: Callable[[], Result]) -> None:
        self.act = act
        self.outcome: list[Result | Exception] = []
        self.is_running = self.is_given_up = False

    def run(self) -> None:
        """Call the function and note its result or error."""
        try:
            self.outcome.append(self.act())
        except Exception as error:
            self.outcome.append(error)
        except BaseException as error:
            self.outcome.append(StructuredOutputError(f"the compiler of grammars failed: {error!r}"))


class BoundedCalls:
    """Calls functions in threads of their own with large stacks, a few at a time. Any thread may use it.

        caller ── waits ──────────── until the deadline
        thread    waits for a place ── starts ──┐
        thread of a large stack                 └─ calls the function

    A thread cannot be stopped: a call that is too late is given up, and keeps its place until it is done.
    Places are taken and stacks are set where no signal is handled, so that none can be lost.
    """

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_RUNNING)

    def call(self, act: Callable[[], Result]) -> Result:
        """Return what a function returns, or raise what it raises.

        Raises:
            StructuredOutputError: it is too late, or no place became free in time.
        """
        job = _Job(act)
        thread = threading.Thread(target=self._run, args=(job,), name="octavo-grammar", daemon=True)
        try:
            thread.start()
            thread.join(DEADLINE_S)
        finally:
            job.is_given_up = True
        if not job.outcome:
            if job.is_running:
                raise StructuredOutputError(f"the grammar takes more than {DEADLINE_S:g} s to compile")
            raise StructuredOutputError("too many grammars are being compiled; try again later")
        (outcome,) = job.outcome
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _run(self, job: _Job) -> None:
        with self._places:
            if job.is_given_up:
                return
            job.is_running = True
            thread = threading.Thread(target=job.run, name="octavo-grammar-stack", daemon=True)
            try:
                with _STACK_SIZE:
                    before = threading.stack_size(_STACK_BYTES)
                    try:
                        thread.start()
                    finally:
                        threading.stack_size(before)
            except (RuntimeError, MemoryError) as error:
                job.outcome.append(
                    StructuredOutputError(f"no thread can be had to compile a grammar: {error}")
                )
                return
            thread.join()


# Between JSON's tokens, room for indentation. Weak models would write spaces for ever.
_WHITESPACE = r"[ \t\r\n]{1,40}"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Compiler:
    """Compiles grammars for one vocabulary. Any thread may use it."""

    def __init__(self, vocabulary: "LLTokenizer") -> None:
        self._vocabulary = vocabulary
        self._calls = BoundedCalls()

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar and find its first mask, which costs the most.

        Raises:
            StructuredOutputError: it is malformed, too costly, or matches nothing.
        """
        eos_token_ids = frozenset(self._vocabulary.eos_tokens)
        return Grammar(self._calls.call(lambda: self._pristine(structured)), eos_token_ids)

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
        strict = strict_schema({} if schema is True else schema, {"whitespace_pattern": _WHITESPACE})
        return LLMatcher.grammar_from_json_schema(json.dumps(strict, ensure_ascii=False))
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
    """Return a regex that matches only this text."""
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


# Text of the grammars that are kept, at least 1 KiB each; compiled, they take up to fifty times as much.
_MAX_KEPT_BYTES = 2**19
_LEAST_BYTES = 2**10


class Grammars:
    """Compiles grammars for one vocabulary. Any thread may use it; the engine's thread should not need to."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Keep what grammars are compiled for; the vocabulary is read when the first one comes.

        Args:
            tokenizer: the model's, if it has one.
            vocab_size: width of the model's logits.
            eos_token_ids: tokens that end an output.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler: Compiler | None = None
        self._reading = threading.Lock()
        self._keeping = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._num_bytes = 0

    def of(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar that parameters ask for, compiled; None: they ask for none.

        Raises:
            StructuredOutputError: it is malformed or too costly, or the model has no tokenizer or no EOS.
            ConfigError: llguidance is not installed.
        """
        return None if params.structured is None else self.compile(params.structured)

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Return a compiled grammar, one that is kept or a new one.

        Raises:
            As `of`.
        """
        with self._keeping:
            grammar = self._kept.get(structured)
            if grammar is not None and not grammar.is_worn:
                self._kept.move_to_end(structured)
                return grammar
        grammar = self._ready_compiler().compile(structured)
        with self._keeping:
            self._keep(structured, grammar)
        return grammar

    def _keep(self, structured: StructuredOutput, grammar: Grammar) -> None:
        if structured not in self._kept:
            self._num_bytes += _size(structured)
        self._kept[structured] = grammar
        self._kept.move_to_end(structured)
        while self._num_bytes > _MAX_KEPT_BYTES:
            oldest, _ = self._kept.popitem(last=False)
            self._num_bytes -= _size(oldest)

    def _ready_compiler(self) -> Compiler:
        with self._reading:
            if self._compiler is None:
                self._compiler = self._read()
            return self._compiler

    def _read(self) -> Compiler:
        if find_spec("llguidance") is None:
            raise ConfigError(f"structured output needs llguidance; run: {install_extra('structured')}")
        if self._tokenizer is None or not self._eos_token_ids:
            raise StructuredOutputError("structured output needs a model with a tokenizer and an EOS token")
        from octavo.engine.structured.grammar_vocabulary import read_vocabulary

        return Compiler(read_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids))


def _size(structured: StructuredOutput) -> int:
    texts = (structured.json_schema, structured.regex, structured.grammar, *(structured.choice or ()))
    return max(_LEAST_BYTES, sum(len(text) for text in texts if isinstance(text, str)))
