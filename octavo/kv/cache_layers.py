"""What a layer of a paged cache keeps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The keys and values of one layer.

    Attributes:
        num_kv_heads: KH.
        head_dim: D.
        window: a token sees its last `window` keys, itself included; None: all.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """KH and D."""
        return self.num_kv_heads, self.head_dim

    @property
    def size(self) -> int:
        """Numbers of a token's keys; its values are as many."""
        return self.num_kv_heads * self.head_dim
