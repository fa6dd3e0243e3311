"""Tiny random checkpoints that embed, classify and rerank, and transformers over the same prompts."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.tokenizer.decoding import byte_level_alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}
TEXTS = [
    "The capital of China is Beijing.",
    "Gravity attracts two bodies towards each other; it gives weight to physical objects.",
    "é 北京 😀",
    "a",
    "The capital of China is Paris, which no map says." * 4,
]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' advice."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def write_tokenizer(folder: Path, *, ends: bool) -> tokenizers.Tokenizer:
    """Write a tokenizer of bytes, yes and no; `ends` puts a special token behind texts."""
    pieces = [*SPECIAL, *byte_level_alphabet(), "no", "ye", "yes"]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.BPE(ids, merges=[("n", "o"), ("y", "e"), ("ye", "s")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>",
            pair="$A <|endoftext|> $B <|endoftext|>",
            special_tokens=[("<|endoftext|>", 0)],
        )
    folder.mkdir(exist_ok=True, parents=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


class Reference:
    """A checkpoint in a folder, and what transformers makes of token ids.

    Attributes:
        folder: of the checkpoint.
        backend: its tokenizer.
        model: transformers' model.
    """

    def __init__(self, folder: Path, name: str, *, ends: bool = False, **options: Any) -> None:
        """Write a checkpoint of a class of transformers, such as Qwen3ForCausalLM."""
        import transformers

        self.folder, self.backend = folder, write_tokenizer(folder, ends=ends)
        kind = (
            name.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification").removesuffix("Model")
        )
        num = self.backend.get_vocab_size()
        # Padding is no token of the texts: transformers classifies by the last token that is none.
        sizes = {**SIZES, "vocab_size": num + 3, "pad_token_id": num + 1, **options}
        with quiet():
            config = getattr(transformers, f"{kind}Config")(**sizes)
            torch.manual_seed(0)
            self.model = getattr(transformers, name)(config).float().eval()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
            self.model.save_pretrained(folder)

    def config(self, **fields: Any) -> "Reference":
        """Add fields to config.json."""
        path = self.folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return self

    def sentence_transformer(
        self, mode: str = "lasttoken", *, normalise: bool = True, **fields: Any
    ) -> "Reference":
        """Add the files of sentence-transformers."""
        module = "sentence_transformers.models."
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")][
            : 2 + normalise
        ]
        listed = [
            {"idx": index, "name": str(index), "path": path, "type": module + kind}
            for index, (path, kind) in enumerate(modules)
        ]
        (self.folder / "modules.json").write_text(json.dumps(listed))
        (self.folder / "1_Pooling").mkdir(exist_ok=True)
        modes = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "lasttoken"), False) | {mode: True}
        pooling = {"word_embedding_dimension": SIZES["hidden_size"]}
        pooling |= {f"pooling_mode_{name}": value for name, value in modes.items()}
        (self.folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling | fields))
        prompts = {"prompts": PROMPTS, "default_prompt_name": None}
        (self.folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        return self

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text).ids

    @torch.inference_mode()
    def states(self, ids: Sequence[int]) -> np.ndarray:
        """Return [T, hidden] states behind the last norm."""
        base = getattr(self.model, "model", self.model)
        return base(torch.tensor([list(ids)])).last_hidden_state[0].numpy()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of labels, or those behind the last token."""
        logits = self.model(torch.tensor([list(ids)])).logits[0]
        return logits if logits.dim() == 1 else logits[-1]

    def embedding(
        self, ids: Sequence[int], pool: Callable[[np.ndarray], np.ndarray] = lambda x: x[-1]
    ) -> np.ndarray:
        return unit(pool(self.states(ids)))


def unit(values: Any) -> np.ndarray:
    return np.asarray(values) / np.linalg.norm(values)


def published(
    query: str,
    document: str,
    instruction: str = "Given a web search query, retrieve relevant passages that answer the query",
) -> str:
    """Return the prompt of Qwen3-Reranker's model card."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
        'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
