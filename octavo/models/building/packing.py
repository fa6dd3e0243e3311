"""Reads weights, or a rank's parts of them, and packs each for its product."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.forms.base import QuantisedWeight
from octavo.gemm.cpu.block_linear import AnyBlocks, TiledBlocks, tiled_on_cpu
from octavo.gemm.cpu.huge_pages import HugePages
from octavo.gemm.linear import Linear
from octavo.gemm.make_linear import make_invariant_linear, make_linear, make_quantised_linear
from octavo.layers import (
    RMSNorm,
    interleave_halves,
    vocabulary_shard,
)
from octavo.models.checkpoint import Checkpoint
from octavo.models.model_config import ModelConfig
from octavo.models.weights import Part
from octavo.parallel import TensorParallel


class Packing:
    """Makes a rank's products and norms of a checkpoint's weights."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        parallel: TensorParallel,
        quantization: str,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._parallel = parallel
        self._quantization = quantization
        self._matrix_dtype = torch.bfloat16 if quantization == "bf16" else checkpoint.dtype
        self._deterministic = deterministic
        # They hold weights that a CPU multiplies in their blocks.
        self._pages = HugePages()
        # Reads matrices whole.
        self._single = self
        if parallel.size > 1:
            self._single = type(self)(config, checkpoint, TensorParallel(), quantization, deterministic)

    def _norm(self, name: str, factor: float = 1.0, stream_scale: float = 1.0) -> RMSNorm:
        # With norms of outputs, what outputs return is summed over ranks already.
        parallel = TensorParallel() if self._config.has_post_norms else self._parallel
        # A factor is folded in where it is not rounded.
        weight = self._norm_weight(name) if factor == 1.0 else factor * self._norm_weight(name, torch.float32)
        return RMSNorm(weight, self._config.rms_norm_eps, parallel, stream_scale)

    def _fused(
        self, names: Sequence[str], rows: Sequence[slice], has_bias: bool, head_dim: int = 0
    ) -> Linear:
        """One product for several projections of the same input.

        With a head_dim, the first two are of queries and keys and reordered for the rotation (see
        layers.rotary).
        """
        size = sum(part.stop - part.start for part in rows)
        weights = [f"{name}.weight" for name in names]
        bias = None
        if has_bias:
            bias = self._checkpoint.empty(size)
            self._fill(bias, [f"{name}.bias" for name in names], rows, head_dim)
        if self._checkpoint.stays_quantised(weights[0]):
            return self._quantised_linear(self._read_quantised(weights, rows, head_dim), bias)
        weight = self._checkpoint.empty(size, self._config.hidden_size, dtype=self._matrix_dtype)
        self._fill(weight, weights, rows, head_dim)
        return self._linear(weight, bias)

    def _read_quantised(
        self, names: Sequence[str], rows: Sequence[slice], head_dim: int
    ) -> Iterator[QuantisedWeight]:
        for index, (name, part) in enumerate(zip(names, rows, strict=True)):
            weight = self._checkpoint.read_quantised(name, rows=self._part(part))
            if head_dim and index < 2:
                order = torch.arange(weight.shape[0], device=weight.device)
                weight = weight.take(self._interleaved(order, head_dim))
            yield weight

    def _fill(self, fused: Tensor, names: Sequence[str], rows: Sequence[slice], head_dim: int) -> None:
        start = 0
        for index, (name, part) in enumerate(zip(names, rows, strict=True)):
            tensor = self._checkpoint.read(name, rows=self._part(part), dtype=fused.dtype)
            if head_dim and index < 2:
                tensor = self._interleaved(tensor, head_dim)
            fused[start : start + tensor.shape[0]] = tensor
            start += tensor.shape[0]

    def _row_parallel(self, name: str, columns: slice, has_bias: bool) -> Linear:
        """A projection whose results are summed over ranks: only rank 0 adds the bias."""
        bias = self._checkpoint.read(f"{name}.bias") if has_bias else None
        bias = bias if self._parallel.rank == 0 else None
        name, part = f"{name}.weight", self._part(columns)
        if self._checkpoint.stays_quantised(name):
            return self._quantised_linear([self._checkpoint.read_quantised(name, columns=part)], bias)
        return self._linear(self._checkpoint.read(name, columns=part, dtype=self._matrix_dtype), bias)

    def _quantised_linear(self, weights: Iterable[QuantisedWeight], bias: Tensor | None) -> Linear:
        # Each is finished before the next one is read: what was read of it can go.
        dtype = self._checkpoint.dtype
        finished = [tiled_on_cpu(weight, self._pages, dtype) for weight in weights]
        return make_quantised_linear(finished, bias, dtype=dtype, matrix_dtype=self._matrix_dtype)

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if self._deterministic:
            return make_invariant_linear(weight, bias)
        return make_linear(weight, bias, quantization=self._quantization)

    def _norm_weight(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A norm's weight; float32 if it is stored with an offset, which is for precision near 0."""
        offset = self._config.norm_weight_offset
        weight = self._checkpoint.read(f"{name}.weight", dtype=torch.float32 if offset else dtype)
        return weight + offset if offset else weight

    def _vocabulary_rows(self, name: str, num_rows: int) -> tuple[Tensor | TiledBlocks, int]:
        """This rank's rows, padded to the share that every rank has, and the id of the first row."""
        rows, share = vocabulary_shard(num_rows, self._parallel)
        if self._checkpoint.stays_quantised(name):
            blocks = self._checkpoint.read_quantised(name, rows=self._part(rows))
            assert isinstance(blocks, AnyBlocks), f"{name}: rows of {blocks.kind} cannot be looked up"
            return TiledBlocks(blocks, self._pages, num_rows=share), rows.start
        weight = self._checkpoint.read(name, rows=self._part(rows), dtype=self._matrix_dtype)
        if weight.shape[0] < share:
            weight = pad(weight, (0, 0, 0, share - weight.shape[0]))
        return weight, rows.start

    def _interleaved(self, tensor: Tensor, head_dim: int) -> Tensor:
        if self._config.rotates_pairs:
            return tensor
        return interleave_halves(tensor, head_dim, self._config.rotary_dim)

    def _part(self, part: slice) -> Part:
        """The slice to read; a single rank reads whole tensors."""
        return None if self._parallel.size == 1 else part
