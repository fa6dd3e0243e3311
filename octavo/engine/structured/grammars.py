"""The grammars of one engine: compiled on demand, the latest ones kept."""

import threading
from collections import OrderedDict
from importlib.util import find_spec

from octavo.engine.structured.compiling import Compiler
from octavo.engine.structured.matcher import Grammar
from octavo.errors import ConfigError, StructuredOutputError
from octavo.install_hint import install_extra
from octavo.sampling_params import SamplingParams, StructuredOutput
from octavo.tokenizer import Tokenizer

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
        from octavo.engine.structured.vocabulary import read_vocabulary

        return Compiler(read_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids))


def _size(structured: StructuredOutput) -> int:
    texts = (structured.json_schema, structured.regex, structured.grammar, *(structured.choice or ()))
    return max(_LEAST_BYTES, sum(len(text) for text in texts if isinstance(text, str)))
