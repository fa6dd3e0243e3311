"""A tiny random model with a tokenizer of bytes, parts of emoji and whole ones, and a chat template.

Its answers are random bytes: half characters, characters cut over tokens, text of all scripts.
"""

import json
from pathlib import Path

import tokenizers
from tiny_model import TINY_LLAMA
from tokenizers import decoders, models, pre_tokenizers

from octavo.tokenizer.decoding import byte_level_alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = ("😀", "🎉", "👩‍🚀", "北京", "日本", "한국", "é", "—", "∑", " the", " of", "\n\n", "hello", "न", "ไ")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 2


def write_model(folder: Path, max_model_len: int = 512) -> Path:
    """Write the model's files, without weights."""
    spelled = {byte: character for character, byte in byte_level_alphabet().items()}
    pieces = ["".join(spelled[byte] for byte in text.encode()) for text in PIECES]
    # The first and the last half of characters of several bytes.
    halves = [half for piece in pieces if len(piece) > 2 for half in (piece[:2], piece[2:])]
    vocabulary = dict.fromkeys([*SPECIAL, *(spelled[byte] for byte in range(256)), *pieces, *halves])
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    backend = tokenizers.Tokenizer(models.BPE(ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = {"vocab_size": len(ids) + 5, "max_position_embeddings": max_model_len, "bos_token_id": 0}
    model = {**TINY_LLAMA, **sizes, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(model))
    return folder
