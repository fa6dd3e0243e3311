"""A step of one token, or one of each of some sequences: cache and options, and three ways to attend them."""

from dataclasses import dataclass, field, replace

import torch
import triton_cases  # noqa: F401  (chooses where kernels run, before they are made)
from torch import Tensor
from torch.nn.functional import rms_norm

from octavo.attention import AttentionMetadata, KVCache
from octavo.attention.cache import FLOAT8, as_bytes
from octavo.layers.layer_options import LayerOptions
from octavo.layers.norm import HeadRMSNorm
from octavo.layers.steps.gpu_step import TritonStep
from octavo.layers.steps.operator_step import OperatorStep


@dataclass
class AloneCase:
    """The last tokens of sequences of some lengths, in one layer; `is_stored`: they have slots.

    A length of 0 is padding.
    """

    length: int | tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float = 0.0
    has_norm: bool = True
    has_sinks: bool = False
    is_stored: bool = True
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    device: str = "cpu"
    is_scaled: bool = False
    value_norm: float | None = None
    keys_are_values: bool = False
    cache: KVCache = field(init=False)

    def __post_init__(self) -> None:
        lengths = (self.length,) if isinstance(self.length, int) else self.length
        (num_heads, num_kv_heads), generator = self.heads, torch.Generator().manual_seed(sum(lengths))
        counts = [-(-length // self.block_size) for length in lengths]
        num_blocks, num_sequences = sum(counts), len(lengths)
        num_all = num_heads + num_kv_heads * (2 - self.keys_are_values)
        used = torch.randperm(num_blocks + 3, generator=generator)[:num_blocks].to(torch.int32)
        # Entries past a sequence's last block are no blocks.
        table = torch.full((num_sequences, max(counts)), 2**30, dtype=torch.int32)
        # What no sequence has written is anything: also the new keys' slots.
        unused = torch.ones(num_blocks + 3, self.block_size, dtype=torch.bool, device=self.device)
        unused[used.long()] = False
        slots, positions = [], []
        for row, (length, own) in enumerate(zip(lengths, used.split(counts), strict=True)):
            table[row, : len(own)] = own
            position = max(0, length - 1)
            positions.append(position)
            is_stored = self.is_stored and length > 0
            slots.append(int(own[-1]) * self.block_size + position % self.block_size if is_stored else -1)
            if length:
                unused[int(own[-1]), position % self.block_size + (not self.is_stored) :] = True
            # What a window has passed is gone, and the table names other blocks for it.
            gone, offset = divmod(max(0, length - (self.window or length)), self.block_size)
            unused[own[:gone].long()] = True
            unused[own[gone : gone + 1].long(), :offset] = True
            table[row, :gone] = int(used[0])

        def numbers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).to(self.device)

        self.metadata = AttentionMetadata(
            cu_seqlens_q=numbers(*range(num_sequences + 1)),
            seq_lens=numbers(*lengths),
            positions=numbers(*positions),
            slot_mapping=numbers(*slots, dtype=torch.int64),
            block_table=table.to(self.device),
            max_query_len=1,
            max_seq_len=max(lengths),
            keys_are_old=num_sequences > 1,
        )
        self.cache = KVCache.allocate(
            num_layers=1,
            num_blocks=num_blocks + 3,
            block_size=self.block_size,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.cache_dtype or self.dtype,
            device=self.device,
        )
        if self.is_scaled:
            assert self.cache.scales is not None
            self.cache.scales.copy_(random(*self.cache.scales.shape).abs() / 50 + 0.01)
        self.old = random(*self.cache.data.shape).to(self.cache.data.dtype)
        self.layer = self.cache.layer(0)
        self.qkv = random(num_sequences, num_all * self.head_dim).to(self.dtype)
        self.angles = random(num_sequences, self.head_dim // 2)
        norm = HeadRMSNorm(random(num_heads + num_kv_heads, self.head_dim).abs() + 0.5, 1e-6)
        self.options = LayerOptions(
            *(0, 0, self.head_dim**-0.5, self.window, self.softcap),
            norm if self.has_norm else None,
            random(num_heads) if self.has_sinks else None,
            has_gemvs=True,
            value_norm=self.value_norm,
            keys_are_values=self.keys_are_values,
        )
        self.cache.data.copy_(self.old)
        for x in (self.layer.k, self.layer.v):
            is_float8 = x.dtype == FLOAT8
            as_bytes(x)[unused] = 0x7F if is_float8 else torch.nan
        self.old.copy_(self.cache.data)

    def by_kernel(self, *, alone: bool = True) -> tuple[Tensor, Tensor]:
        """Results and the whole cache, by one kernel, or by the kernels for any step."""
        step = TritonStep(self.cache, self.metadata, num_heads=self.heads[0])
        rotations = torch.stack((self.angles.cos(), self.angles.sin()))
        return self._run(step, rotations, replace(self.options, has_gemvs=alone))

    def by_operators(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The same, by the plain PyTorch reference; dtype: of tensors and cache."""
        case = self if dtype is None else self._cast(dtype)
        step = OperatorStep(case.cache, case.metadata, case.heads[0], "reference")
        rotations = torch.polar(torch.ones_like(self.angles), self.angles)[:, None]
        options = replace(self.options, value_norm=None, keys_are_values=False)
        return case._run(step, rotations, options, case._with_values())

    def _with_values(self) -> Tensor:
        """The projection as if it had made the values that are stored."""
        heads = self.qkv.unflatten(1, (-1, self.head_dim))
        num_kv_heads = self.heads[1]
        others, values = heads, heads[:, -num_kv_heads:]
        if self.keys_are_values:
            values = torch.cat((values[..., ::2], values[..., 1::2]), -1)
        else:
            others = heads[:, :-num_kv_heads]
        if self.value_norm is not None:
            values = rms_norm(values, (self.head_dim,), eps=self.value_norm)
        return torch.cat((others, values), 1).flatten(1)

    def _run(
        self,
        step: OperatorStep | TritonStep,
        rotations: Tensor,
        options: LayerOptions,
        qkv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.cache.data.copy_(self.old)
        out = step.attend(self.qkv.clone() if qkv is None else qkv, rotations, options)
        return out, self.cache.data.clone()

    def _cast(self, dtype: torch.dtype) -> "AloneCase":
        other = replace(self, dtype=dtype, cache_dtype=None)
        other.qkv, other.angles = self.qkv.to(dtype), self.angles
        other.options, other.metadata = self.options, self.metadata
        other.old = self.old.to(dtype)
        return other
