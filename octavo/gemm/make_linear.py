"""Makes linear layers by the rows of gemm.table, and says which ones it would make."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.forms.base import join_rows
from octavo.gemm.linear import Linear
from octavo.gemm.portable import invariant_tiling
from octavo.gemm.product import Layer, Target, find_layer, load
from octavo.gemm.table import EXPERT_LAYERS, LAYERS
from octavo.kernels.device import has_triton

# Quantizations that round numbers which a checkpoint stores as floats.
_ROUNDED = ("bf16", "int8")


def multiplies(
    kind: str, device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None = None
) -> bool:
    """Return whether quantised weights of a kind are multiplied as they are.

    Args:
        kind: see QuantisedWeight.
        device: of the weights.
        dtype: of activations.
        capability: of a GPU that is named only, see Target.
    """
    return find_layer(LAYERS[kind], Target(device, dtype, capability)) is not None


def describe_layers(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Say which layers multiply a kind of quantised weights, and why no faster ones do.

    Args:
        kind: see QuantisedWeight, or a quantization that make_linear rounds to.
        device: of the weights.
        dtype: of activations.
    """
    reasons = []
    for layer in LAYERS[kind]:
        reason = layer.unsupported_reason(Target(device, dtype))
        if reason is None:
            return layer.describe() + "".join(f" ({reason})" for reason in reasons)
        reasons.append(f"by no faster layer: {reason}")
    raise AssertionError(f"{kind} on {device} with {dtype}: ask multiplies() first")


def describe_experts(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Say how experts of a kind that stays quantised are multiplied; see describe_layers."""
    if device.type == "cuda":
        return EXPERT_LAYERS[kind].describe()
    return describe_layers(kind, device, dtype)


def looks_up(kind: str, device: torch.device) -> bool:
    """Return whether an embedding can stay quantised: its rows are looked up in what a layer multiplies."""
    return kind == "blocks" and device.type == "cpu"


def stacks_experts(weight: Tensor) -> bool:
    """Return whether experts become one tensor, given a weight of their dtype on their device."""
    return has_triton(weight)


def unstackable_reason(
    kind: str, device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None = None
) -> str | None:
    """Return why a GPU's kernels cannot multiply a kind of experts as they are stored, or None if they can.

    Args:
        kind: see QuantisedWeight.
        device: of the weights.
        dtype: of activations.
        capability: of a GPU that is named only, see Target.
    """
    if kind not in EXPERT_LAYERS:
        return f"no kernel multiplies experts in {kind}; there are kernels for {', '.join(EXPERT_LAYERS)}"
    return EXPERT_LAYERS[kind].unsupported_reason(Target(device, dtype, capability))


def make_quantised_linear(
    weights: Sequence[Any],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    matrix_dtype: torch.dtype | None = None,
) -> Linear:
    """Return a layer from [T, K] to [T, sum of N_i] that multiplies weights as they are.

    Args:
        weights: LayerWeights [N_i, K] of one kind that is multiplied; they lie above one another.
        bias: [sum of N_i], or None.
        dtype: of activations.
        matrix_dtype: of matrices that are not quantised: many rows may be rounded to it; None: dtype.
    """
    kind, target = weights[0].kind, Target(weights[0].device, dtype)
    layer = find_layer(LAYERS[kind], target)
    assert layer is not None, f"{kind} on {target.device} with {dtype}: ask multiplies() first"
    if layer.device == "cpu" and layer.form:
        rounds = matrix_dtype == torch.bfloat16
        return load(layer.make)(weights, bias, rounds=rounds)
    if layer.device != "cuda":
        return load(layer.make)(weights, bias)
    return _make_on_gpu(layer, weights, bias)


def _make_on_gpu(layer: Layer, weights: Sequence[Any], bias: Tensor | None) -> Linear:
    parts = join_rows(weights)
    packed = [part if layer.pack is None else layer.pack(part) for part in parts]
    if layer.fits is not None and not all(map(layer.fits, packed)):
        layer, packed = LAYERS[parts[0].kind][-1], parts
    return load(layer.make)(packed, bias)


def make_linear(weight: Tensor, bias: Tensor | None = None, *, quantization: str = "none") -> Linear:
    """Return a layer from [T, in] to [T, out] in the dtype of x.

    Args:
        weight: [out, in]; copied if it is packed or rounded, else kept.
        bias: [out], or None.
        quantization: "bf16" for a weight in bfloat16, "int8" for 8-bit weights and activations (both: CPU,
            float32); "auto", "none" and "fp8" leave a weight that is made of floats as it is.

    Raises:
        ConfigError: the quantization is unknown or cannot run here.
    """
    if quantization in _ROUNDED:
        (layer,) = LAYERS[quantization]
        reason = layer.unsupported_reason(Target(weight.device, weight.dtype))
        if reason is not None:
            raise ConfigError(f'quantization="{quantization}" cannot run: {reason}; use quantization="none"')
    elif quantization in ("auto", "none", "fp8"):
        layer = next(each for each in LAYERS["floats"] if each.fits is None or each.fits(weight))
    else:
        names = ", ".join(f'"{name}"' for name in ("auto", "none", "fp8", *_ROUNDED))
        raise ConfigError(f"quantization must be one of {names}, got {quantization!r}")
    return load(layer.make)(weight, bias)


def make_invariant_linear(
    weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Linear:
    """Return a layer from [T, in] to [T, out] in which no row's bits depend on the other rows.

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
    (layer,) = LAYERS["deterministic"]
    return load(layer.make)(weight, bias, dtype=dtype)
