"""A tokenizer in the form llguidance needs."""

from collections.abc import Sequence, Set

from llguidance import LLTokenizer

from octavo.tokenizer import Tokenizer


class _Vocabulary:
    """The attributes that LLTokenizer reads.

    Attributes:
        tokens: each id's bytes; empty for ids without a piece, which no mask ever allows.
        special_token_ids: tokens that are markup: grammars name them, text never matches them.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize text in which nothing is markup, even if it looks like a special token."""
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        ids = self._encode(text)
        if self._special_ids.isdisjoint(ids):
            return ids
        return [token_id for character in text for token_id in self._encode(character)]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Set[int]) -> LLTokenizer:
    """Read a vocabulary as wide as the model's logits. Takes a second for 150,000 tokens.

    Args:
        tokenizer: the model's.
        vocab_size: width of the logits; ids past the tokenizer's own are padding.
        eos_token_ids: at least one.
    """
    eos = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
    return LLTokenizer(_Vocabulary(tokenizer, vocab_size, eos), eos_token=eos)  # type: ignore[arg-type]
