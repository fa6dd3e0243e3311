"""Tiny random models, a stand-in for a checkpoint, and a paged step loop without an engine."""

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache
from octavo.kv import plan_layout
from octavo.models import Decoder, ModelConfig, load_decoder, parameter_shapes
from octavo.parallel import TensorParallel


class DictWeights:
    """A WeightSource over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(
        self, name: str, *, rows: slice | None = None, columns: slice | None = None, dtype: torch.dtype
    ) -> Tensor:
        tensor = self.tensors[name][rows or slice(None)]
        return (tensor[:, columns] if columns else tensor).to(dtype).clone()

    def close(self) -> None:
        pass


def random_weights(config: ModelConfig, seed: int = 0) -> DictWeights:
    generator = torch.Generator().manual_seed(seed)
    return DictWeights(
        {
            name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
            for name, shape in parameter_shapes(config).items()
        }
    )


def make_decoder(config: ModelConfig, weights: DictWeights, **options: Any) -> Decoder:
    arguments = {"dtype": torch.float32, "device": "cpu", "parallel": TensorParallel()} | options
    return load_decoder(config, weights, **arguments)


class PagedSequences:
    """Sequences that grow in a shared paged cache; blocks are handed out in shuffled order."""

    def __init__(self, decoder: Decoder, *, block_size: int, num_blocks: int = 64, seed: int = 0) -> None:
        self.decoder = decoder
        # Nothing is given back here, so layers form groups by their heads alone.
        self.layout = plan_layout(decoder.cache_layers, block_size, max_tokens=1)
        num_blocks *= len(self.layout.groups)
        self.cache = KVCache.of_layout(self.layout, num_blocks, torch.float32, "cpu")
        # What was never stored must never be read.
        self.cache.data.fill_(float("nan"))
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[list[int]]] = {}

    @torch.inference_mode()
    def step(self, chunks: Mapping[str, list[int]]) -> dict[str, Tensor]:
        """Append each sequence's chunk and return its [chunk, vocab] logits."""
        size = self.cache.block_size
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self.layout.groups]
        for name, chunk in chunks.items():
            tokens, blocks = (
                self.tokens.setdefault(name, []),
                self.blocks.setdefault(name, [[] for _ in slots]),
            )
            span = range(len(tokens), len(tokens) + len(chunk))
            tokens += chunk
            for group, own, places in zip(self.layout.groups, blocks, slots, strict=True):
                while len(own) * size < len(tokens):
                    own.append(group.block_id(self.free.pop(), 0, self.cache.num_blocks))
                places += [own[position // size] * size + position % size for position in span]
            positions += span
        metadata = [self._metadata(chunks, positions, own, group) for group, own in enumerate(slots)]
        input_ids = torch.tensor([token for chunk in chunks.values() for token in chunk], dtype=torch.int32)
        hidden = self.decoder.forward(input_ids, self.cache, *metadata)
        logits = self.decoder.compute_logits(hidden)
        return dict(zip(chunks, logits.split([len(chunk) for chunk in chunks.values()]), strict=True))

    def _metadata(
        self, chunks: Mapping[str, list[int]], positions: list[int], slots: list[int], group: int
    ) -> AttentionMetadata:
        query_lens = [len(chunk) for chunk in chunks.values()]
        seq_lens = [len(self.tokens[name]) for name in chunks]
        blocks = [self.blocks[name][group] for name in chunks]
        table = np.full((len(chunks), max(map(len, blocks))), -1, dtype=np.int32)
        for row, own in zip(table, blocks, strict=True):
            row[: len(own)] = own
        return AttentionMetadata(
            cu_seqlens_q=torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_table=torch.from_numpy(table),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )


def run_chunked(
    sequences: PagedSequences, prompts: Mapping[str, list[int]], seed: int = 0
) -> dict[str, Tensor]:
    """Feed prompts in random chunks, different sequences mixed in each step; logits of every position."""
    pick = random.Random(seed)
    left = {name: list(tokens) for name, tokens in prompts.items()}
    logits: dict[str, list[Tensor]] = {name: [] for name in prompts}
    while any(left.values()):
        chunks = {name: tokens[: pick.choice((1, 2, 5, 9))] for name, tokens in left.items() if tokens}
        for name, rows in sequences.step(chunks).items():
            logits[name].append(rows)
            del left[name][: len(rows)]
    return {name: torch.cat(rows) for name, rows in logits.items()}


def greedy(sequences: PagedSequences, logits: Mapping[str, Tensor], num_tokens: int) -> dict[str, list[int]]:
    """Continue every sequence from the logits of its last position, all in one batch."""
    last = {name: int(rows[-1].argmax()) for name, rows in logits.items()}
    tokens = {name: [token] for name, token in last.items()}
    for _ in range(num_tokens - 1):
        rows = sequences.step({name: [row[-1]] for name, row in tokens.items()})
        for name, row in rows.items():
            tokens[name].append(int(row[-1].argmax()))
    return tokens


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers comments on tiny configs; those comments are not what is tested."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def hugging_face_model(config: Any, seed: int = 0) -> Any:
    """A transformers model in float32, eager attention, every weight random and none near a special value."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        scale = 0.25 if parameter.dim() > 1 else 0.3
        center = 0.0 if parameter.dim() > 1 else 0.5
        parameter.data = center + scale * torch.randn(parameter.shape)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(0.5 + 0.5 * torch.rand(buffer.shape))
        if name.endswith("e_score_correction_bias"):
            # Enough to change choices.
            buffer.copy_(0.3 * torch.randn(buffer.shape))
    return model


def hugging_face_weights(model: Any) -> DictWeights:
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return DictWeights(tensors)


@torch.inference_mode()
def hugging_face_logits(model: Any, tokens: list[int]) -> Tensor:
    with quiet_transformers():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def hugging_face_greedy(model: Any, tokens: list[int], num_tokens: int) -> list[int]:
    out = list(tokens)
    for _ in range(num_tokens):
        out.append(int(hugging_face_logits(model, out)[-1].argmax()))
    return out[len(tokens) :]
