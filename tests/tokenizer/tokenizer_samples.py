"""Small vocabularies and texts for the tokenizer tests, made on the spot."""

import json
import random
from functools import cache

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? They're sure they've seen 12345 foxes.",
    "def main():\n    for index in range(1000):\n        print(index,  'spaces   and\ttabs')\n\n\n",
    "你好。世界。这是一个测试。 日本語のテキスト。 한국어 텍스트입니다.",
    "Café naïve résumé Straße Ελληνικά русский язык हिन्दी עברית العربية",
    "I'LL SAY IT'S 3.14159 OR 2,000,000! e=mc^2 <html> {json: [1, 2]} a_b-c/d\\e",
    "emoji 😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 combining e\u0301 n\u0303 zero\u200bwidth",
] * 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FRAGMENTS = [
    *"aZé0 9.,!?'\n\t_",
    *("the ", " quick", "n't", "'ll", "'S", "  ", "    ", "\n\n", "\r\n", " \n ", "12", "3456", "2,000"),
    *(
        "你好",
        "世界",
        "日本",
        "한국",
        "😀",
        "👩‍👩‍👧‍👦",
        "🇩🇪",
        "e\u0301",
        "\u00a0",
        "\u3000",
        "Ελ",
        "<|im_end|>",
        "ﬁ",
        "Å",
    ),
]


def sample_texts(count: int) -> list[str]:
    """Deterministic mixtures of words, digits, contractions, CJK, emoji and white space."""
    chance = random.Random(7)
    mixed = ["".join(chance.choices(FRAGMENTS, k=chance.randint(1, 12))) for _ in range(count)]
    return ["", " ", "\n", *CORPUS[:6], *mixed]


@cache
def byte_level_vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Pieces and merges of a byte-level BPE trained on the corpus; the first pieces are special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIALS)
    backend.train_from_iterator(CORPUS, trainer)
    return _pieces(backend), tuple(" ".join(merge) for merge in _merges(backend))


def byte_level_metadata(pre: str) -> dict[str, object]:
    """GGUF metadata of the byte-level vocabulary."""
    pieces, merges = byte_level_vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(pieces) - len(SPECIALS)),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


@cache
def sentencepiece_pieces() -> tuple[str, ...]:
    """Pieces of a SentencePiece-style BPE: unknown, BOS, EOS, 256 bytes, merged pieces, characters."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500))
    learned = _pieces(backend)
    # emoji and Hangul stay out, so that they fall back to bytes
    learned = [piece for piece in learned if all(ord(character) < 0xAC00 for character in piece)]
    merged = [piece for piece in learned if len(piece) > 1] + ["▁▁", "▁▁▁▁"]
    characters = [piece for piece in learned if len(piece) == 1]
    return ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters)


def sentencepiece_metadata() -> dict[str, object]:
    """GGUF metadata of the SentencePiece vocabulary; earlier pieces have higher scores."""
    pieces = sentencepiece_pieces()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _pieces(backend: Tokenizer) -> tuple[str, ...]:
    vocabulary = backend.get_vocab()
    return tuple(sorted(vocabulary, key=vocabulary.__getitem__))


def _merges(backend: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
