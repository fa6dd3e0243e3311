"""A decoder layer with one token on a GPU: attention in one kernel, in those for any step, in PyTorch's.

    python benchmarks/gpu_alone.py [--models 0.6b 8b] [--formats bf16 fp8 int4] [--contexts 640 4096 32768]
                                   [--save MACHINE]

A layer is attention (norms of heads, rotation, the store of key and value, and attention over pages), o, gate
and up, down, and the next layer's qkv, each reading what the one before wrote. A CUDA graph runs several
layers with weights and caches of their own, several times the L2 cache, and its time is divided by their
number. The products are the same in all columns: the fastest of Octavo's. PyTorch's attention is F.rms_norm,
a rotation, index_copy_ and scaled_dot_product_attention over keys that lie in one piece. The bound is bytes
of weights and of the context's keys and values over 4.8 TB/s, an H200's peak.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.common import make_parser, publish, table
from support.products import BYTES_PER_SECOND, EPS, FORMS, MODELS, Chain, microseconds, random_numbers
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from octavo.attention import AttentionMetadata, KVCache
from octavo.layers.layer_options import LayerOptions
from octavo.layers.norm import HeadRMSNorm
from octavo.layers.steps.gpu_step import TritonStep

_HEAD_DIM, _BLOCK_SIZE = 128, 64
# (layer's index, qkv [1, n]) -> [1, H * D]
Attention = Callable[[int, Tensor], Tensor]


class Sequence:
    """The last token of a sequence of `context` tokens, and a cache for each layer of a chain."""

    def __init__(self, chain: Chain, context: int) -> None:
        o, qkv = chain.shapes[0], chain.shapes[-1]
        self.num_heads = o.size // _HEAD_DIM
        self.num_kv_heads = (qkv.num_weight_rows // _HEAD_DIM - self.num_heads) // 2
        self.context = context
        num_blocks = -(-context // _BLOCK_SIZE)
        self.cache = KVCache.allocate(
            num_layers=len(chain.layers),
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            num_kv_heads=self.num_kv_heads,
            head_dim=_HEAD_DIM,
            dtype=torch.bfloat16,
            device="cuda",
        )
        self.cache.data.normal_()
        self.kv_bytes = 2 * 2 * context * self.num_kv_heads * _HEAD_DIM
        last = torch.tensor([context - 1], dtype=torch.int32, device="cuda")
        self.metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            seq_lens=last + 1,
            positions=last,
            slot_mapping=last.long(),
            block_table=torch.arange(num_blocks, dtype=torch.int32, device="cuda")[None],
            max_query_len=1,
            max_seq_len=context,
        )
        angle = torch.randn(1, _HEAD_DIM // 2, device="cuda")
        self.rotations = torch.stack((angle.cos(), angle.sin()))
        self.norm = HeadRMSNorm(torch.ones(self.num_heads + self.num_kv_heads, _HEAD_DIM, device="cuda"), EPS)

    def by_octavo(self, *, alone: bool) -> Attention:
        """Octavo's attention; alone: by the kernel for a step's only token."""
        step = TritonStep(self.cache, self.metadata, num_heads=self.num_heads)
        scale = _HEAD_DIM**-0.5
        return lambda index, qkv: step.attend(
            qkv, self.rotations, LayerOptions(index, 0, scale, None, 0.0, self.norm, has_gemvs=alone)
        )

    def by_torch(self, index: int, qkv: Tensor) -> Tensor:
        """PyTorch's operators; block after block, the pages of a kv head lie in one piece."""
        heads = qkv.view(1, -1, _HEAD_DIM)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        keys, values = self._dense(index)
        for cache, new in ((keys, self._rotate(rms_norm(k, (_HEAD_DIM,), eps=EPS))), (values, v)):
            cache.index_copy_(1, self.metadata.slot_mapping, new.transpose(0, 1))
        q = self._rotate(rms_norm(q, (_HEAD_DIM,), eps=EPS)).transpose(0, 1)
        seen = keys[None, :, : self.context], values[None, :, : self.context]
        return scaled_dot_product_attention(q[None], *seen, enable_gqa=True).reshape(1, -1)

    def _rotate(self, heads: Tensor) -> Tensor:
        cos, sin = self.rotations.to(heads.dtype)
        first, second = heads[..., ::2], heads[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

    def _dense(self, index: int) -> Tensor:
        """[2, KH, N * B, D] keys and values of a layer, in the same memory."""
        return self.cache.data[index].view(2, self.num_kv_heads, -1, _HEAD_DIM)


def layer_us(chain: Chain, attention: Attention) -> float:
    """Time of a layer with an attention."""
    indices = {id(layer): index for index, layer in enumerate(chain.layers)}
    qkv = random_numbers(1, chain.shapes[-1].num_weight_rows)

    hidden = random_numbers(1, chain.shapes[0].num_columns)

    def run(layer: list[Any]) -> None:
        nonlocal qkv
        qkv = chain.run(layer, attention(indices[id(layer)], qkv), hidden)

    return microseconds(run, chain.layers)


def compare(model: str, form: str, contexts: list[int]) -> Iterator[dict[str, object]]:
    """Time a layer at several contexts."""
    *layer, _ = MODELS[model]
    chain = Chain(layer, FORMS[form])
    layer_bytes = sum(shape.num_weights for shape in layer) * FORMS[form].bytes_per_number
    for context in contexts:
        sequence = Sequence(chain, context)
        bound_us = (layer_bytes + sequence.kv_bytes) / BYTES_PER_SECOND * 1e6
        kinds = {
            "alone_us": sequence.by_octavo(alone=True),
            "any_us": sequence.by_octavo(alone=False),
            "torch_us": sequence.by_torch,
        }
        # Twice, as what is measured first after memory was allocated takes longer.
        us = {name: layer_us(chain, attention) for name, attention in kinds.items()}
        us = {name: min(us[name], layer_us(chain, attention)) for name, attention in kinds.items()}
        yield {
            **{"model": model, "format": form, "context": context, "bound_us": round(bound_us, 1)},
            **{name: round(value, 1) for name, value in us.items()},
            "of_bound": round(bound_us / us["alone_us"], 3),
            "speedup": round(us["any_us"] / us["alone_us"], 2),
        }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--formats", choices=("bf16", "fp8", "int4"), nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[640, 4096, 32768])
    arguments = parser.parse_args()
    results = [
        result
        for model in arguments.models
        for form in arguments.formats
        for result in compare(model, form, arguments.contexts)
    ]
    print(table(list(results[0]), [list(result.values()) for result in results]))
    publish("gpu_alone", {"results": results}, arguments)


if __name__ == "__main__":
    main()
