"""A network over named sequences: what a loop of your own needs beside `PagedSequences`. Others build on it.

sequences.alloc, update, fork, truncate  ->  Extension  ->  PagedDecoder.run  ->  logits
"""

from collections.abc import Hashable, Mapping

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, ForestPlan, KVCache
from octavo.kv import Extension, PagedSequences
from octavo.models import ModelConfig, load_decoder, load_tokenizer, open_weights, read_config, resolve_model
from octavo.parallel import TensorParallel


class PagedDecoder:
    """SmolLM2, its cache and the bookkeeping of the cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        source = resolve_model("smollm2")
        weights = open_weights(source)
        config = ModelConfig.from_hf(read_config(source))
        self.network = load_decoder(
            config, weights, dtype=torch.float32, device="cpu", parallel=TensorParallel()
        )
        weights.close()
        tokenizer = load_tokenizer(source)
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.cache = KVCache.allocate(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.network.num_kv_heads,
            head_dim=config.head_dim,
        )
        self.sequences = PagedSequences(
            num_blocks, block_size, bytes_per_block=self.cache.nbytes // num_blocks
        )

    @torch.inference_mode()
    def run(self, extensions: Mapping[Hashable, Extension]) -> Tensor:
        """Compute what alloc and update handed out, all in one step; return [S, vocab] last logits."""
        parts = list(extensions.values())
        query_lens = [len(part.slots) for part in parts]
        cu_seqlens_q = np.cumsum([0, *query_lens], dtype=np.int32)
        table, seq_lens = self.sequences.block_table(list(extensions))
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.from_numpy(cu_seqlens_q),
            seq_lens=torch.from_numpy(seq_lens),
            positions=torch.from_numpy(np.concatenate([part.positions for part in parts])).int(),
            slot_mapping=torch.from_numpy(np.concatenate([part.slots for part in parts])),
            block_table=torch.from_numpy(table),
            max_query_len=max(query_lens),
            max_seq_len=int(seq_lens.max()),
            # Blocks that sequences share are read once for all of them.
            work=ForestPlan.from_block_tables(table, seq_lens, cu_seqlens_q, self.cache.block_size),
        )
        input_ids = torch.tensor([token for part in parts for token in part.token_ids])
        hidden = self.network.forward(input_ids, self.cache, metadata)
        return self.network.compute_logits(hidden[cu_seqlens_q[1:] - 1]).float()


if __name__ == "__main__":
    model = PagedDecoder(num_blocks=16, block_size=8)
    extension = model.sequences.alloc("fable", model.tokenizer.encode("Once upon a time, there was a"))
    tokens: list[int] = []
    for _ in range(12):
        tokens.append(int(model.run({"fable": extension}).argmax()))
        extension = model.sequences.update("fable", tokens[-1:])
    print(model.tokenizer.decode(tokens))
