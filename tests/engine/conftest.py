"""The embedded tokenizer, and grammars over it."""

from collections.abc import Callable

import pytest
from structured_helpers import EOS, VOCAB

from octavo.engine.structured import Grammars
from octavo.models import load_tokenizer, resolve_model
from octavo.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(resolve_model("smollm2", "auto"))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, vocab_size=VOCAB, eos_token_ids=EOS)


@pytest.fixture
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
