"""PagedAttention as in a textbook: a module that keeps the keys and values of its sequences in blocks."""

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from octavo.errors import InvalidArgumentError
from octavo.kv import Extension, PagedSequences
from octavo.ops import flash_attn_with_kvcache


class PagedAttention(nn.Module):
    """One layer's paged cache and causal attention over it.

        attention.alloc("a", 5)                 blocks for 5 tokens
        out = attention(q, k, v, "a")           q [5, H, D]; k, v [5, KH, D] are stored, then attended to
        attention.update("a")                   room for one more token (or for many)
        out = attention(q, k, v, "a")           q [1, H, D] sees all 6
        attention.free("a")

    `alloc` and `update` raise OutOfBlocksError when blocks run out, and then change nothing.

    Args:
        block_size: tokens per block.
        num_blocks: blocks of the cache.
        num_heads: query heads H, a multiple of num_kv_heads.
        num_kv_heads: KH.
        head_dim: D.
        dtype: of queries, keys and values.
        device: of the cache.
    """

    k_cache: Tensor
    v_cache: Tensor

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.register_buffer("k_cache", torch.empty(shape, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v_cache", torch.empty(shape, dtype=dtype, device=device), persistent=False)
        self.num_heads = num_heads
        # The module never sees tokens, so nothing can be shared by what they are.
        self.sequences = PagedSequences(num_blocks, block_size, enable_prefix_caching=False)
        self._pending: dict[Hashable, Extension] = {}

    def alloc(self, seq_id: Hashable, num_tokens: int) -> None:
        """Start a sequence with room for its first tokens."""
        self._pending[seq_id] = self.sequences.alloc(seq_id, [0] * num_tokens)

    def update(self, seq_id: Hashable, num_tokens: int = 1) -> None:
        """Make room for the next tokens of a sequence."""
        if seq_id in self._pending:
            raise InvalidArgumentError(f"call forward for the tokens of {seq_id!r} before more are added")
        self._pending[seq_id] = self.sequences.update(seq_id, [0] * num_tokens)

    def free(self, seq_id: Hashable) -> None:
        """End a sequence; its blocks can be used again."""
        self.sequences.free(seq_id)
        self._pending.pop(seq_id, None)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, seq_id: Hashable) -> Tensor:
        """Store key and value [T, KH, D] of the tokens added last; return their attention [T, H, D].

        Raises:
            InvalidArgumentError: no tokens were added, or not T, or a shape does not fit.
        """
        extension = self._pending.get(seq_id)
        if extension is None or query.shape[:2] != (len(extension.slots), self.num_heads):
            num_tokens = 0 if extension is None else len(extension.slots)
            raise InvalidArgumentError(
                f"{seq_id!r} waits for query [{num_tokens}, {self.num_heads}, D], got {list(query.shape)}; "
                f"call alloc or update for the tokens first"
            )
        block_table, _ = self.sequences.block_table([seq_id])
        out = flash_attn_with_kvcache(
            *(query[None], self.k_cache, self.v_cache, key[None], value[None]),
            cache_seqlens=extension.start,
            block_table=torch.from_numpy(block_table).to(query.device),
            causal=True,
        )
        del self._pending[seq_id]
        return out[0]


def main() -> None:
    torch.manual_seed(0)
    attention = PagedAttention(block_size=4, num_blocks=8, num_heads=4, num_kv_heads=2, head_dim=16)
    q, k, v = torch.randn(11, 4, 16), torch.randn(11, 2, 16), torch.randn(11, 2, 16)
    outs = []
    attention.alloc("a", 6)
    outs.append(attention(q[:6], k[:6], v[:6], "a"))
    for part in (slice(6, 7), slice(7, 11)):  # one token, then four: they cross a block edge
        attention.update("a", part.stop - part.start)
        outs.append(attention(q[part], k[part], v[part], "a"))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    dense = dense[0].transpose(0, 1)
    print(f"largest difference from dense attention: {(torch.cat(outs) - dense).abs().max():.1e}")
    print(f"blocks in use: {attention.sequences.stats().num_referenced} of 8")
    attention.free("a")


if __name__ == "__main__":
    main()
