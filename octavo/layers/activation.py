"""Gated activations on a fused gate and up projection."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor
from torch.nn.functional import gelu, silu

from octavo.gpu.device import has_triton
from octavo.layers.cpu import layers as cpu_layers


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, n], of [T, 2 n] = [gate | up]."""
    if has_triton(gate_up):
        return _by_triton(gate_up, "silu")
    if cpu_layers.unsupported_reason(gate_up) is None:
        return cpu_layers.compiled_layers().silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return silu(gate).mul_(up)


def gelu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up with the exact (erf) gelu; shapes as silu_and_multiply."""
    if has_triton(gate_up):
        return _by_triton(gate_up, "gelu")
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate).mul_(up)


def gelu_tanh_and_multiply(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up with gelu's tanh approximation; shapes as silu_and_multiply."""
    if has_triton(gate_up):
        return _by_triton(gate_up, "gelu_tanh")
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh").mul_(up)


def _by_triton(gate_up: Tensor, name: str) -> Tensor:
    from octavo.layers.triton.activation import gated_activation

    return gated_activation(gate_up, name)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": silu_and_multiply, "gelu": gelu_and_multiply, "gelu_tanh": gelu_tanh_and_multiply}
)
