"""Streamed text equals text decoded at once, and both equal the tokenizers package on valid UTF-8."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import byte_level_metadata, sample_texts, sentencepiece_metadata

from octavo.errors import InvalidArgumentError, PromptError, UnsupportedModelError
from octavo.tokenizer import Tokenizer
from octavo.tokenizer.gguf_vocabulary import read_gguf_vocabulary

METADATA = {
    "byte-level": byte_level_metadata("gpt-2"),
    "llama": sentencepiece_metadata(),
    "gemma": sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False},
}
TOKENIZERS = {name: Tokenizer.from_gguf(metadata, name) for name, metadata in METADATA.items()}
BACKENDS = {name: read_gguf_vocabulary(metadata, name).backend for name, metadata in METADATA.items()}
kinds = pytest.mark.parametrize("kind", list(TOKENIZERS))


def streamed(tokenizer: Tokenizer, token_ids: list[int], step: int, skip: bool) -> list[str]:
    decoder = tokenizer.incremental_decoder(skip_special_tokens=skip)
    pushes = [decoder.push(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    return [*pushes, decoder.finish()]


@kinds
@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 620), max_size=40), st.integers(1, 7), st.booleans())
def test_streamed_random_ids_equal_decode(kind, token_ids, step, skip):
    tokenizer = TOKENIZERS[kind]
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, token_ids, step, skip)) == whole


@kinds
@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 620), max_size=40), st.booleans())
def test_decode_equals_the_tokenizers_package_on_any_ids(kind, token_ids, skip):
    ours = TOKENIZERS[kind].decode(token_ids, skip_special_tokens=skip)
    assert ours == BACKENDS[kind].decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([*"a€😀".encode(), 0xFF, 0xE2, 0x80, 0xC3]), max_size=12), st.integers(0, 12))
def test_runs_of_byte_tokens_are_text_as_a_whole_or_not_at_all(kind, run, cut):
    token_ids = [3 + byte for byte in run]
    token_ids.insert(cut, 400)
    whole = BACKENDS[kind].decode(token_ids)
    assert TOKENIZERS[kind].decode(token_ids) == whole
    assert "".join(streamed(TOKENIZERS[kind], token_ids, 1, True)) == whole


@kinds
@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60))
def test_any_text_survives_encoding_and_streaming(kind, text):
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == BACKENDS[kind].decode(
        token_ids, skip_special_tokens=False
    )
    if kind != "llama" and "▁" not in text:
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


@kinds
def test_real_text_never_shows_half_a_character(kind):
    tokenizer = TOKENIZERS[kind]
    for text in sample_texts(100):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        pushes = streamed(tokenizer, token_ids, 1, False)
        assert "\ufffd" not in "".join(pushes)
        assert "".join(pushes) == tokenizer.decode(token_ids, skip_special_tokens=False)
        assert pushes[-1] == "" or token_ids[-1] in tokenizer._token_bytes.byte_ids


def test_a_character_is_shown_when_its_run_of_bytes_ends():
    """Any byte more could make all of the run invalid."""
    tokenizer, euro = TOKENIZERS["gemma"], [3 + byte for byte in "€".encode()]
    text = tokenizer.token_text(400)
    assert streamed(tokenizer, [*euro, 400], 1, True) == ["", "", "", f"€{text}", ""]
    assert streamed(tokenizer, euro, 1, True) == ["", "", "", "€"]
    assert streamed(tokenizer, [*euro, 3 + 0xFF, 3 + 0x41], 1, True) == [
        "",
        "",
        "",
        "\ufffd" * 4,
        "\ufffd",
        "",
    ]


def test_byte_level_characters_are_shown_with_their_last_byte():
    tokenizer, backend = TOKENIZERS["byte-level"], BACKENDS["byte-level"]
    euro = [backend.token_to_id(piece) for piece in "âĤ¬"]
    assert streamed(tokenizer, euro, 1, True) == ["", "", "€", ""]
    assert streamed(tokenizer, euro[:2], 1, True) == ["", "", "\ufffd"]


def test_only_the_first_space_is_stripped_across_pushes():
    tokenizer = TOKENIZERS["llama"]
    space = tokenizer.encode("  a", add_special_tokens=False)
    assert "".join(streamed(tokenizer, [1, *space, *space], 1, True)) == "  a   a"


def test_special_tokens_are_skipped_or_shown():
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode("<|im_start|>fox<|im_end|>")
    assert tokenizer.decode(token_ids) == "fox"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|im_start|>fox<|im_end|>"


def test_special_token_inside_a_character_ends_it():
    tokenizer, backend = TOKENIZERS["byte-level"], BACKENDS["byte-level"]
    half = backend.token_to_id("â")
    assert tokenizer.decode([half, 2, half], skip_special_tokens=False) == "\ufffd<|im_end|>\ufffd"


def test_cost_per_token_does_not_grow_with_the_answer():
    tokenizer = TOKENIZERS["gemma"]

    def seconds(num_tokens: int) -> float:
        decoder = tokenizer.incremental_decoder()
        start = time.process_time()
        for _ in range(num_tokens):
            decoder.push([3 + 0x80])
        return time.process_time() - start

    seconds(1000)
    assert seconds(100_000) < 2.0


def test_token_text_keeps_the_leading_space():
    llama, backend = TOKENIZERS["llama"], BACKENDS["llama"]
    piece = next(
        piece for piece in backend.get_vocab() if piece[0] == "▁" and piece[1:].isascii() and piece[1:]
    )
    assert llama.token_text(backend.token_to_id(piece)) == " " + piece[1:]
    assert llama.token_text(3 + 0xE2) == "\ufffd"
    assert llama.token_bytes(3 + 0xE2) == b"\xe2"
    assert llama.token_text(1) == "<s>"


def test_padding_ids_decode_to_nothing_and_other_values_are_refused():
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.decode([10_000]) == ""
    for bad in (-1, 2**40, "a", 1.5):
        with pytest.raises(InvalidArgumentError, match="token id"):
            tokenizer.decode([bad])  # type: ignore[list-item]


def test_text_that_is_not_text_is_refused():
    tokenizer = TOKENIZERS["byte-level"]
    for bad in (None, 3, b"bytes", "\ud800", ["a"]):
        with pytest.raises(PromptError, match="valid Unicode"):
            tokenizer.encode(bad)  # type: ignore[arg-type]


def test_other_decoders_are_refused_by_name():
    from tokenizers import decoders

    from octavo.tokenizer.decoding import piece_style

    backend = read_gguf_vocabulary(METADATA["byte-level"], "test").backend
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        piece_style(backend, "test")
