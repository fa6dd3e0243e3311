"""The one place that chooses the GEMM for y = x W^T + b.

    a layer, when it is made      float32 on a CPU        elsewhere
      a weight in blocks          blocks                  grouped
      a weight in float8          float8                  float8, or dequantised
      a weight in MXFP4           blocks                  grouped; a GPU's experts: expert_table
      other weights               packed, or plain        plain
      quantization="bf16"         bfloat16                refused
      quantization="int8"         int8, as blocks         refused
      deterministic=True          refused                 invariant, on a GPU with Triton

    each GEMM of a plain layer on a GPU with Triton, by the rows M of x
      1                           gemv, on a Hopper GPU, half precision: fuses norm, activation, residual sum
      1, elsewhere to 4           skinny: fuses the same
      2 to 256                    hopper, on a Hopper GPU: fuses activation and residual sum
      others                      plain

Each GEMM's own unsupported_reason says whether it can run. Which one is fastest is decided here, by limits
measured on an H200. To add layers for a kind of quantised weights, see forms.base. To add a kernel for
some numbers of rows, add a name to Gemm and a branch to choose_gemm.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.forms.base import LayerWeight
from octavo.gemm import dequantised
from octavo.gemm import float8_linear as float8_on_gpu
from octavo.gemm import mxfp4_linear as mxfp4_on_gpu
from octavo.gemm import packed_linear as grouped
from octavo.gemm.cpu import bfloat16, int8
from octavo.gemm.cpu import block_linear as blocks
from octavo.gemm.cpu import float8_rows as float8_on_cpu
from octavo.gemm.cpu import mkl as packed
from octavo.gemm.cpu.bfloat16 import Bfloat16Linear
from octavo.gemm.cpu.mkl import PackedLinear
from octavo.gemm.hopper.floats import dense_gemm_tiling as hopper_tiling
from octavo.gemm.hopper.floats import dense_gemv_tiling as gemv_tiling
from octavo.gemm.plain import Linear, PlainLinear
from octavo.gemm.portable import invariant_tiling, skinny_tiling

Gemm = Literal["gemv", "skinny", "hopper", "plain"]

# Quantization -> (unsupported_reason of a weight, the layer, describe: how it multiplies, in a few words).
_QUANTIZED: Mapping[
    str,
    tuple[Callable[[Tensor], str | None], Callable[[Tensor, Tensor | None], Linear], Callable[[], str]],
]
_QUANTIZED = MappingProxyType(
    {
        "bf16": (bfloat16.unsupported_reason, Bfloat16Linear, bfloat16.describe),
        "int8": (int8.unsupported_reason, int8.make_layer, int8.describe),
    }
)


class _Layers(Protocol):
    """A module of layers that multiply a kind of quantised weights; DESCRIPTION says how, in a few words."""

    @property
    def DESCRIPTION(self) -> str: ...

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None: ...

    def make_layer(self, weights: Any, bias: Tensor | None) -> Linear: ...


# Kind of a QuantisedWeight -> modules, the fastest first.
_LAYERS: Mapping[str, tuple[_Layers, ...]] = MappingProxyType(
    {
        "blocks": (blocks, grouped),
        # Groups of columns that are not a multiple of 32, or columns with scales of their own: no kernel
        # multiplies them.
        "odd blocks": (),
        "float8": (float8_on_gpu, float8_on_cpu, dequantised),
        "mxfp4": (blocks, mxfp4_on_gpu, dequantised),
    }
)

# Gemv: with 16-bit weights, for no larger K, as programs with longer rows take more than half an SM, and
# at no LM head, where the skinny GEMM is 1 to 2 % faster.
_GEMV_MAX_SIZE = 16384
# Skinny: from two rows on, cuBLAS is faster if K is this large, and at an LM head (large N).
_SKINNY_MAX_SIZE = 4096
# Hopper: minimum of rows; maximum of rows for small N, for large N, and for large weights or K. For more rows
# cuBLAS is as fast, or up to 1.7 times as fast (ADR 15).
HOPPER_MIN_ROWS = 2
HOPPER_MAX_ROWS = 256
_HOPPER_MAX_ROWS_WIDE = 128
_HOPPER_MAX_ROWS_LARGE = 64
_WIDE = 2048
_LONG = 4096
_LARGE = 4096 * 1024
_VOCABULARY = 65536


def multiplies(kind: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether quantised weights of a kind are multiplied as they are.

    Args:
        kind: see QuantisedWeight.
        device: of the weights.
        dtype: of activations.
    """
    return _find_layers(kind, device, dtype) is not None


def describe_layers(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Say which layers multiply a kind of quantised weights, and why no faster ones do.

    Args:
        kind: see QuantisedWeight, or a quantization that make_linear rounds to.
        device: of the weights.
        dtype: of activations.
    """
    if kind in _QUANTIZED:
        return _QUANTIZED[kind][2]()
    reasons = []
    for layers in _LAYERS[kind]:
        reason = layers.unsupported_reason(device, dtype)
        if reason is None:
            return layers.DESCRIPTION + "".join(f" ({reason})" for reason in reasons)
        reasons.append(f"by no faster layer: {reason}")
    raise AssertionError(f"{kind} on {device} with {dtype}: ask multiplies() first")


def looks_up(kind: str, device: torch.device) -> bool:
    """Return whether an embedding can stay quantised: its rows are looked up in what a layer multiplies."""
    return kind == "blocks" and device.type == "cpu"


def make_quantised_linear(
    weights: Sequence[LayerWeight],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    matrix_dtype: torch.dtype | None = None,
) -> Linear:
    """Return a callable from [T, K] to [T, sum of N_i] that multiplies weights as they are.

    Args:
        weights: [N_i, K] each, of one kind that is multiplied; they lie above one another.
        bias: [sum of N_i], or None.
        dtype: of activations.
        matrix_dtype: of matrices that are not quantised: many rows may be rounded to it; None: dtype.
    """
    kind, device = weights[0].kind, weights[0].device
    layers = _find_layers(kind, device, dtype)
    assert layers is not None, f"{kind} on {device} with {dtype}: ask multiplies() first"
    if layers is float8_on_cpu and matrix_dtype == torch.bfloat16:
        return float8_on_cpu.make_layer(weights, bias, rounds=True)
    return layers.make_layer(weights, bias)


def _find_layers(kind: str, device: torch.device, dtype: torch.dtype) -> _Layers | None:
    return next((each for each in _LAYERS[kind] if each.unsupported_reason(device, dtype) is None), None)


def make_linear(weight: Tensor, bias: Tensor | None = None, *, quantization: str = "none") -> Linear:
    """Return a callable from [T, in] to [T, out] in the dtype of x.

    Args:
        weight: [out, in]; copied if it is packed or rounded, else kept.
        bias: [out], or None.
        quantization: "bf16" for a weight in bfloat16, "int8" for 8-bit weights and activations (both: CPU,
            float32); "auto", "none" and "fp8" leave a weight that is made of floats as it is.

    Raises:
        ConfigError: the quantization is unknown or cannot run here.
    """
    if quantization in _QUANTIZED:
        unsupported_reason, make, _ = _QUANTIZED[quantization]
        reason = unsupported_reason(weight)
        if reason is not None:
            raise ConfigError(f'quantization="{quantization}" cannot run: {reason}; use quantization="none"')
        return make(weight, bias)
    if quantization not in ("auto", "none", "fp8"):
        names = ", ".join(f'"{name}"' for name in ("auto", "none", "fp8", *_QUANTIZED))
        raise ConfigError(f"quantization must be one of {names}, got {quantization!r}")
    return (PackedLinear if packed.unsupported_reason(weight) is None else PlainLinear)(weight, bias)


def make_invariant_linear(
    weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Linear:
    """Return a callable from [T, in] to [T, out] in which no row's bits depend on the other rows.

    Args:
        weight: [out, in].
        bias: [out], or None.
        dtype: of results; None: that of x.

    Raises:
        ConfigError: the weight is not on a GPU with Triton.
    """
    reason = invariant_tiling.unsupported_reason(weight)
    if reason is not None:
        raise ConfigError(f"deterministic=True cannot run: {reason}; use deterministic=False, or a GPU")
    from octavo.gemm.portable.invariant import InvariantLinear

    return InvariantLinear(weight, bias, dtype=dtype)


def has_fused_gemms(linear: Linear) -> TypeGuard[PlainLinear]:
    """Return whether choose_gemm supports a layer."""
    return isinstance(linear, PlainLinear) and skinny_tiling.unsupported_reason(linear.weight) is None


def is_gemv(linear: Linear) -> bool:
    """Return whether a GEMV multiplies a single row by a layer's weight: one that fetches weights early.

    few_linear counts as one.
    """
    if isinstance(linear, grouped.GroupedLinear):
        return linear.has_gemv
    if isinstance(linear, float8_on_gpu.Float8GpuLinear):
        return float8_on_gpu.choose_path(1, linear.weight) == "gemv"
    return has_fused_gemms(linear) and choose_gemm(linear.weight[:1], linear.weight) == "gemv"


def choose_gemm(x: Tensor, weight: Tensor) -> Gemm:
    """Return the GEMM for x W^T. Called per layer and step: costs about a microsecond.

    Args:
        x: [M, K], or a tensor of the same shape and layout.
        weight: [N, K] of a layer that has_fused_gemms.
    """
    num_rows = x.shape[0]
    num_columns, size = weight.shape
    has_gemv = num_rows == 1 and size <= _GEMV_MAX_SIZE and num_columns < _VOCABULARY
    if has_gemv and gemv_tiling.unsupported_reason(weight) is None:
        return "gemv"
    max_rows = HOPPER_MAX_ROWS if num_columns <= _WIDE else _HOPPER_MAX_ROWS_WIDE
    if size >= _LONG or num_columns * size > _LARGE:
        max_rows = _HOPPER_MAX_ROWS_LARGE
    if HOPPER_MIN_ROWS <= num_rows <= max_rows and hopper_tiling.unsupported_reason(x, weight) is None:
        return "hopper"
    is_short = 1 < num_rows <= skinny_tiling.MAX_ROWS and size < _SKINNY_MAX_SIZE
    return "skinny" if num_rows == 1 or (is_short and num_columns < _VOCABULARY) else "plain"
