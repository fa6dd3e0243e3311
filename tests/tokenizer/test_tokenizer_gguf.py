"""GGUF vocabularies give the ids of the tokenizers they were made from."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizer_samples import (
    SPECIALS,
    byte_level_metadata,
    byte_level_vocabulary,
    sample_texts,
    sentencepiece_metadata,
    sentencepiece_pieces,
)
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.errors import FileFormatError, ModelNotFoundError, UnsupportedModelError
from octavo.models import resolve_model
from octavo.tokenizer import Tokenizer
from octavo.tokenizer.gguf_bpe import _pre_tokenizer, merges_from_scores

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_greedy_fp32.json"
TEXTS = sample_texts(400)


@pytest.fixture(scope="module")
def smollm2_metadata():
    try:
        return resolve_model("smollm2").gguf.metadata
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2(smollm2_metadata):
    return Tokenizer.from_gguf(smollm2_metadata, "SmolLM2")


@pytest.fixture(scope="module")
def golden_rows():
    return json.loads(GOLDEN.read_text())["rows"]


class TestSmolLM2:
    def test_prompts_encode_to_the_golden_ids(self, smollm2, golden_rows):
        for row in golden_rows:
            assert smollm2.encode(row["prompt"]) == row["prompt_ids"]
            assert smollm2.decode(row["prompt_ids"], skip_special_tokens=False) == row["prompt"]

    def test_digits_are_split_one_by_one(self, smollm2):
        assert [smollm2.token_text(i) for i in smollm2.encode("in 2024")] == ["in", " ", *"2024"]
        # the digit splits the text first, so that both spaces before it form one word
        assert [smollm2.token_text(i) for i in smollm2.encode("in  20")] == ["in", "  ", *"20"]

    def test_facts(self, smollm2):
        assert smollm2.vocab_size == 49152
        assert smollm2.bos_token_id == 1
        assert smollm2.eos_token_ids == {2}

    def test_text_survives_the_round_trip(self, smollm2):
        for text in TEXTS:
            assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text

    def test_chat_template_renders_the_golden_prompt(self, smollm2, golden_rows):
        rendered = smollm2.chat_template.render([{"role": "user", "content": "What is gravity?"}])
        assert rendered == golden_rows[0]["prompt"]

    def test_is_built_quickly(self, smollm2_metadata):
        def seconds():
            start = time.process_time()
            Tokenizer.from_gguf(smollm2_metadata, "SmolLM2")
            return time.process_time() - start

        # The least of three: tests on the other hyperthread of a core stretch a single one.
        assert min(seconds() for _ in range(3)) < 0.2


def byte_level_oracle(pre: str) -> Backend:
    """The same vocabulary as model authors publish it in tokenizer.json."""
    pieces, merges = byte_level_vocabulary()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    llama3 = pre == "llama-bpe"
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, pairs, ignore_merges=llama3))
    if llama3:
        from transformers.convert_slow_tokenizer import TikTokenConverter

        split = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in SPECIALS])
    return backend


@pytest.mark.parametrize("pre", ["gpt-2", "olmo", "smollm", "llama-bpe"])
def test_byte_level_ids_equal_the_published_form(pre):
    oracle, ours = byte_level_oracle(pre), Tokenizer.from_gguf(byte_level_metadata(pre), "test")
    for text in TEXTS:
        assert ours.encode(text) == oracle.encode(text).ids
        assert ours.decode(oracle.encode(text).ids) == oracle.decode(oracle.encode(text).ids)


def test_qwen2_ids_equal_transformers():
    from transformers import Qwen2Tokenizer

    pieces, merges = byte_level_vocabulary()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    oracle = Qwen2Tokenizer(vocab={p: i for i, p in enumerate(pieces)}, merges=pairs)
    oracle.add_special_tokens({"additional_special_tokens": SPECIALS[1:]})
    ours = Tokenizer.from_gguf(byte_level_metadata("qwen2"), "test")
    for text in TEXTS:
        assert ours.encode(text) == oracle.encode(text)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        (
            "default",
            ["It", "'", "s", " ", "$", "123", "45", ",", " a", "...", "b", "  ", " c", "?<", "x", ">", "\n"],
        ),
        ("falcon3", ["It", "'s", " $", "123", "45", ",", " a", "...", "b", "  ", " c", "?<", "x", ">\n"]),
        (
            "deepseek-r1-qwen",
            ["It", "'s", " $", *"12345", ",", " a", "...", "b", "  ", " c", "?<", "x", ">\n"],
        ),
        ("tekken", ["It", "'s", " $", *"12345", ",", " a", "...", "b", "  ", " c", "?<", "x", ">\n"]),
    ],
)
def test_words_of_other_names(pre, words, caplog):
    cut = _pre_tokenizer(pre).pre_tokenize_str("It's $12345, a...b   c?<x>\n")
    decoder = decoders.ByteLevel()
    assert [decoder.decode([piece]) for piece, _ in cut] == words
    Tokenizer.from_gguf(byte_level_metadata(pre), "test")
    assert ("convert the model again" in caplog.text) == (pre == "default")


def test_words_of_gpt4o():
    """Where they begin and end, by tiktoken's rule for o200k_base, and that the text comes back."""
    text = "HelloWorld don't SHOUTing  x=12345;\n\n /usr/bin ÜberStraße 你好 a\u0301"
    words = [
        "Hello",
        "World",
        " don't",
        " SHOUTing",
        " ",
        " x",
        "=",
        "123",
        "45",
        ";\n\n",
        " /",
        "usr",
        "/bin",
    ]
    words += [" Über", "Straße", " 你好", " a\u0301"]
    pieces = _pre_tokenizer("gpt-4o").pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words
    ours = Tokenizer.from_gguf(byte_level_metadata("gpt-4o"), "test")
    assert ours.decode(ours.encode(text)) == text


def test_pre_tokenizers_differ_on_digits():
    lengths = [
        len(Tokenizer.from_gguf(byte_level_metadata(pre), "test").encode("12345 foxes"))
        for pre in ("gpt-2", "llama-bpe", "qwen2")
    ]
    assert lengths[0] < lengths[2]
    assert lengths[1] <= lengths[2]


def test_llama3_takes_whole_words_that_no_merges_reach():
    lengths = {}
    for pre in ("gpt-2", "llama-bpe"):
        metadata = byte_level_metadata(pre)
        metadata["tokenizer.ggml.tokens"] = [*byte_level_vocabulary()[0], "Ġzebra"]
        metadata["tokenizer.ggml.token_type"] = [3] * 3 + [1] * (len(byte_level_vocabulary()[0]) - 2)
        lengths[pre] = len(Tokenizer.from_gguf(metadata, "test").encode(" zebra"))
    assert lengths["llama-bpe"] == 1
    assert lengths["gpt-2"] > 1


def join_by_score(symbols: list[str], ids: dict[str, int]) -> list[str]:
    """SentencePiece's own procedure: join the neighbours that give the best piece until none does."""
    while True:
        joined = [(ids[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not joined:
            return symbols
        _, i = min(joined)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]


def sentencepiece_oracle(text: str, *, prefix: bool) -> list[int]:
    """Ids by SentencePiece's own procedure, for text without special tokens."""
    ids = {piece: i for i, piece in enumerate(sentencepiece_pieces())}
    symbols = join_by_score(list(("▁" if prefix and text else "") + text.replace(" ", "▁")), ids)
    by_bytes = [[ids[s]] if s in ids else [3 + byte for byte in s.encode()] for s in symbols]
    return [token_id for token_ids in by_bytes for token_id in token_ids]


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_sentencepiece_ids_equal_joining_by_score(prefix):
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": prefix}
    ours = Tokenizer.from_gguf(metadata, "test")
    for text in TEXTS:
        token_ids = ours.encode(text, add_special_tokens=False)
        assert token_ids == sentencepiece_oracle(text, prefix=prefix), text
        assert ours.decode(token_ids) == text


def gemma4_metadata() -> dict[str, object]:
    """Metadata of a vocabulary whose merges are in the file; scores say nothing."""
    first = sentencepiece_pieces()[259:]
    merges = merges_from_scores({piece: -i for i, piece in enumerate(first)})
    return sentencepiece_metadata() | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.scores": [0.0] * len(sentencepiece_pieces()),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
    }


def test_gemma4_ids_equal_those_of_its_merges():
    metadata = gemma4_metadata()
    ours = Tokenizer.from_gguf(metadata, "test")
    for text in TEXTS:
        token_ids = ours.encode(text, add_special_tokens=False)
        assert token_ids == sentencepiece_oracle(text, prefix=False), text
        assert ours.decode(token_ids) == text
    assert ours.encode("") == [1]
    with pytest.raises(FileFormatError, match="merges"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.merges": ["x 你"]}, "test")
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(FileFormatError, match=r"key tokenizer\.ggml\.merges, got none"):
        Tokenizer.from_gguf(metadata, "test")


def test_gemma4_waits_for_the_results_of_tools():
    metadata = gemma4_metadata() | {
        "tokenizer.ggml.tokens": [*sentencepiece_pieces(), "<turn|>", "<|tool_response>"],
        "tokenizer.ggml.token_type": [2, 3, 3]
        + [6] * 256
        + [1] * (len(sentencepiece_pieces()) - 259)
        + [3, 4],
        "tokenizer.chat_template": "{{ messages }}<turn|><|tool_response>",
    }
    del metadata["tokenizer.ggml.scores"]
    first = len(sentencepiece_pieces())
    assert Tokenizer.from_gguf(metadata, "test").eos_token_ids == {2, first, first + 1}


def test_user_defined_tokens_are_matched_in_the_text():
    metadata = sentencepiece_metadata()
    pieces, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(pieces, list)
    assert isinstance(types, list)
    pieces += ["▁▁▁", "<tool>"]
    types += [4, 4]
    metadata["tokenizer.ggml.scores"] = np.zeros(len(pieces), np.float32)
    metadata["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    metadata["tokenizer.ggml.add_space_prefix"] = False
    ours = Tokenizer.from_gguf(metadata, "test")
    token_ids = ours.encode("a   b<tool>", add_special_tokens=False)
    assert token_ids[1::2] == [len(pieces) - 2, len(pieces) - 1]
    assert ours.decode(token_ids) == "a   b<tool>"


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_special_tokens_of_phi3_take_the_spaces_behind_them_along(architecture):
    """As the family's tokenizer.json has it (rstrip), which a file does not tell."""
    metadata = sentencepiece_metadata() | {"general.architecture": architecture}
    first = len(sentencepiece_pieces())
    pieces = [*sentencepiece_pieces(), "<|endoftext|>", "<|user|>", "<|end|>", "<tool>"]
    metadata["tokenizer.ggml.tokens"] = pieces
    metadata["tokenizer.ggml.scores"] = [-float(i) for i in range(len(pieces))]
    metadata["tokenizer.ggml.token_type"] = [2, 3, 4] + [6] * 256 + [1] * (first - 259) + [3, 3, 3, 4]
    ours = Tokenizer.from_gguf(metadata, "test")
    end, user, done, tool = range(first, first + 4)
    spaces = " \n " if architecture == "llama" else ""
    for token_id, behind in (
        (user, spaces),
        (done, spaces),
        (2, spaces),
        *((i, " \n ") for i in (0, 1, end, tool)),
    ):
        text = f"x{pieces[token_id]} \n y"
        found = ours.encode(text, add_special_tokens=False)
        before, after = (sentencepiece_oracle(part, prefix=True) for part in ("x", behind + "y"))
        assert found == [*before, token_id, *after], text


def test_bos_and_eos_follow_the_file():
    spm, bpe = sentencepiece_metadata(), byte_level_metadata("llama-bpe")
    assert Tokenizer.from_gguf(spm, "test").encode("")[:1] == [1]
    assert Tokenizer.from_gguf(spm | {"tokenizer.ggml.add_bos_token": False}, "test").encode("") == []
    assert Tokenizer.from_gguf(spm | {"tokenizer.ggml.add_eos_token": True}, "test").encode("") == [1, 2]
    assert Tokenizer.from_gguf(spm, "test").encode("", add_special_tokens=False) == []
    assert Tokenizer.from_gguf(bpe, "test").encode("") == []
    del bpe["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(bpe, "test").encode("") == [1]


def test_eos_ids_are_all_that_the_file_and_its_template_name():
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.eos_token_id": 0}
    assert Tokenizer.from_gguf(metadata, "test").eos_token_ids == {0}
    eot = metadata | {"tokenizer.ggml.eot_token_id": 1}
    assert Tokenizer.from_gguf(eot, "test").eos_token_ids == {0, 1}
    template = metadata | {"tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>"}
    assert Tokenizer.from_gguf(template, "test").eos_token_ids == {0, 2}


def test_named_templates():
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    template = Tokenizer.from_gguf(byte_level_metadata("gpt-2") | named, "test").chat_template
    assert template is not None
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages) == "plain"
    assert template.render(messages, tools=[]) == "tools"
    assert Tokenizer.from_gguf(byte_level_metadata("gpt-2"), "test").chat_template is None


@pytest.mark.parametrize(
    ("key", "value", "error", "said"),
    [
        ("tokenizer.ggml.model", "bert", UnsupportedModelError, "'bert'"),
        ("tokenizer.ggml.pre", "viking", UnsupportedModelError, "'viking'"),
        ("tokenizer.ggml.model", 3, FileFormatError, "Expected `str`, got `int` - at `tokenizer.ggml.model`"),
        ("tokenizer.ggml.tokens", None, FileFormatError, "required field `tokenizer.ggml.tokens`"),
        (
            "tokenizer.ggml.tokens",
            [1, 2],
            FileFormatError,
            r"`str`, got `int` - at `tokenizer.ggml.tokens\[0\]",
        ),
        ("tokenizer.ggml.token_type", [1, 2], FileFormatError, "592 numbers"),
        ("tokenizer.ggml.token_type", [[1], [2, 3]], FileFormatError, "`int`, got `array`"),
        ("tokenizer.ggml.token_type", [0.5] * 592, FileFormatError, "`int`, got `float`"),
        ("tokenizer.ggml.merges", ["a"], FileFormatError, "'a'"),
        ("tokenizer.ggml.merges", ["a 你"], FileFormatError, "merges"),
        ("tokenizer.ggml.merges", "a b", FileFormatError, "got `str`"),
        ("tokenizer.ggml.eos_token_id", 592, FileFormatError, "below 592"),
        ("tokenizer.ggml.eos_token_id", True, FileFormatError, "got `bool`"),
        ("tokenizer.ggml.add_bos_token", "no", FileFormatError, "got `str`"),
        ("tokenizer.chat_template", 1, FileFormatError, "a string"),
    ],
)
def test_bad_metadata_is_refused_by_key(key, value, error, said):
    metadata = byte_level_metadata("gpt-2") | {key: value}
    if value is None:
        del metadata[key]
    with pytest.raises(error, match=said):
        Tokenizer.from_gguf(metadata, "test.gguf")


def test_repeated_pieces_and_missing_bytes_are_refused():
    metadata = sentencepiece_metadata()
    pieces = list(sentencepiece_pieces())
    with pytest.raises(FileFormatError, match=r"'</s>' twice"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": ["</s>", *pieces[1:]]}, "test")
    pieces[3] = "other"
    with pytest.raises(FileFormatError, match="256 byte tokens"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": pieces}, "test")
    with pytest.raises(FileFormatError, match="scores"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.scores": [1.0]}, "test")
