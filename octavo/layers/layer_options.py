"""Settings of a layer's attention besides its weights."""

from dataclasses import dataclass

from torch import Tensor

from octavo.layers.norm import HeadRMSNorm


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """One layer's attention.

    Attributes:
        layer: index of the cache's layer that it reads.
        rope: index of its rotary frequencies among the network's.
        scale: factor of q.k.
        window: a token sees its last `window` keys, itself included; None: all.
        softcap: bound of the scores; 0: none.
        qk_norm: norm of q and k heads before the rotation, or None.
        sinks: [H] score of one more key of each query head, whose value is 0; None: there is none.
        has_gemvs: whether a single row meets the projections before and after attention in GEMVs. Kernels
            that fetch weights early then multiply a few rows, too.
        value_norm: added to the mean square in a norm of value heads that has no weight; None: there is none.
        keys_are_values: the projection has q and k heads only, and a value is its key before norm and
            rotation, stored with its halves one after the other: numbers 0, 2, 4, ..., then 1, 3, 5, ...
        shares_cache: the projection has q heads only: another layer stores the keys and values that this one
            reads.
    """

    layer: int
    rope: int
    scale: float
    window: int | None
    softcap: float
    qk_norm: HeadRMSNorm | None
    sinks: Tensor | None = None
    has_gemvs: bool = False
    value_norm: float | None = None
    keys_are_values: bool = False
    shares_cache: bool = False
