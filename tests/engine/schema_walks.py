"""Random outputs that a grammar allows, over a vocabulary of single bytes."""

import random

import numpy as np
from llguidance import LLTokenizer

from octavo.engine.structured.compiler import Compiler
from octavo.engine.structured.matcher import Grammar
from octavo.sampling_params import StructuredOutput

EOS = 256
_SPACES = frozenset(b" \t\r\n")


class Bytes:
    """What llguidance reads of a tokenizer."""

    is_tokenizer_wrapper = True
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (EOS,)
    eos_token_id, bos_token_id = EOS, None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


COMPILER = Compiler(LLTokenizer(Bytes(), eos_token=[EOS]))  # type: ignore[arg-type]


def compiled(schema: object) -> Grammar:
    return COMPILER.compile(StructuredOutput(json_schema=schema))  # type: ignore[arg-type]


def walk(grammar: Grammar, seed: int, limit: int = 2000) -> str | None:
    """Return one text that the grammar allows, or None if it grows too long; escapes are frequent."""
    rng, matcher, output = random.Random(seed), grammar.matcher(), bytearray()
    while len(output) < limit:
        allowed = _allowed(matcher.raw.compute_bitmask())
        assert allowed, f"a dead end after {bytes(output)!r}"
        if EOS in allowed:
            return output.decode()
        byte = _choose(rng, allowed, len(output))
        output.append(byte)
        assert matcher.accept(byte) is None
        if matcher.is_complete:
            return output.decode()
    return None


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a text is one that the grammar allows."""
    matcher = grammar.matcher()
    for byte in text.encode():
        if byte not in _allowed(matcher.raw.compute_bitmask()):
            return False
        assert matcher.accept(byte) is None
    return bool(matcher.raw.is_accepting())


def _allowed(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits[: EOS + 1]).tolist()


def _choose(rng: random.Random, allowed: list[int], length: int) -> int:
    """Choose a byte: the longer the text, the sooner it ends; not often white space."""
    if rng.random() < min(0.9, 0.05 + length / 300):
        for byte in b'"}]':
            if byte in allowed:
                return byte
    if ord("\\") in allowed and rng.random() < 0.2:
        return ord("\\")
    return rng.choice([byte for byte in allowed if byte not in _SPACES] or allowed)
