"""Gated activations on a fused gate and up projection."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor
from torch.nn.functional import gelu, silu

from octavo.gemm.cpu import compiled_norm as cpu_layers
from octavo.kernels.clamped_swiglu import NAME as CLAMPED
from octavo.kernels.clamped_swiglu import clamped_swiglu
from octavo.kernels.device import has_triton

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": silu, "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh")}
)
"""By name; "gelu" is the exact one (erf), "gelu_tanh" its approximation."""


def activate_and_multiply(gate_up: Tensor, name: str) -> Tensor:
    """Return activation(gate) * up, [T, n], of [T, 2 n] = [gate | up].

    The name is one of ACTIVATIONS, or "clamped_swiglu", which is not a product of an activation and up.
    """
    if has_triton(gate_up):
        from octavo.kernels.activation import gated_activation

        return gated_activation(gate_up, name)
    if name == "silu" and cpu_layers.unsupported_reason(gate_up) is None:
        return cpu_layers.compiled_layers().silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    if name == CLAMPED:
        return clamped_swiglu(gate, up)
    return ACTIVATIONS[name](gate).mul_(up)
