"""Prompts: what is text, what is token ids, and what is neither."""

from array import array

import numpy as np
import pytest

from octavo.engine.prompt_reader import Prompt, PromptReader
from octavo.errors import PromptError

# Of a size that every byte is an id of it.
READER = PromptReader(None, vocab_size=300, max_model_len=100, num_kv_tokens=100)
BYTES = [b"hi", bytearray(b"hi"), memoryview(b"hi"), np.bytes_(b"hi"), b""]


@pytest.mark.parametrize("content", BYTES, ids=lambda content: type(content).__name__)
def test_bytes_are_no_token_ids(content: bytes) -> None:
    for prompt in (content, {"prompt": content}, {"prompt_token_ids": content}, [content]):
        with pytest.raises(PromptError):
            READER.read(prompt)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match=f"got {type(content).__name__}"):
        READER.read_continuation(content)


def test_ids_may_come_in_any_kind_of_list() -> None:
    kinds: list[Prompt] = [[104, 105], (104, 105), array("i", [104, 105]), range(104, 106)]
    kinds += [np.array([104, 105], dtype=np.uint8), {"prompt_token_ids": [104, 105]}]  # type: ignore[list-item]
    for kind in kinds:
        assert READER.read(kind).listed == [104, 105]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": [104, 105]}, "prompt must be a string, got list"),
        ({"prompt_token_ids": "hi"}, "prompt_token_ids must be a list of token ids, got str"),
        ({"prompt_ids": [1]}, "did you mean 'prompt_token_ids'"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one of"),
        ({}, "exactly one of"),
        (5, "a prompt must be a string or a list of token ids, got int"),
        (None, "got NoneType"),
        ([1, None], "token ids must be integers, got None"),
        ([300], r"token ids must be in \[0, 299\], got 300"),
        ([-1], "got -1"),
        ([2**40], "got 1099511627776"),
        ([True], "token ids must be integers, got True"),
        ("hi", "this model has no tokenizer"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        READER.read(prompt)  # type: ignore[arg-type]
