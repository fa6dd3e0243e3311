"""All layers of a decoder in one call into C, where their weights are in blocks.

Called layer by layer, a step of one token spends as much time in Python, and between parallel regions, as in
products.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from octavo.attention.cpu.kernel import AttendCall, StoreCall
from octavo.layers.attention import AttentionLayer
from octavo.layers.block import BlockInput, BlockOutput, PlainInput, PlainOutput
from octavo.layers.cpu.library import layers_library
from octavo.layers.feed_forward import FeedForward
from octavo.layers.linear.blocks import BlockLinear, TiledBlocks, use_huge_pages

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Layer(ctypes.Structure):
    """Layer of stack.c."""

    _fields_ = [
        *((name, _POINTER) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "feed_forward_norm", "head_norm")),
        *((name, _INT) for name in ("cache_layer", "rope", "window")),
        *((name, _FLOAT) for name in ("attention_eps", "feed_forward_eps", "head_eps", "scale", "softcap")),
    ]


class StackStep(ctypes.Structure):
    """Step of stack.c; whoever makes one keeps what it points to."""

    _fields_ = [
        *((name, _POINTER) for name in ("rotations", "plan")),
        ("attend", AttendCall),
        ("store", StoreCall),
        *((name, _POINTER) for name in ("keys", "values")),
        ("layer_floats", _INT),
    ]


class LayerStack:
    """The layers of a decoder, for steps on a CPU."""

    def __init__(self, layers: Sequence[tuple[AttentionLayer, FeedForward]]) -> None:
        """Keep layers of which unsupported_reason returns None, and move their weights into huge pages."""
        self._alive = layers
        use_huge_pages([weight for layer in layers for weight in _weights(*layer)])
        self._layers = (_Layer * len(layers))(*(_describe(*layer) for layer in layers))
        self._run = _run_layers()

    def __call__(self, hidden: Tensor, step: StackStep) -> int:
        """Run all layers over hidden [T, hidden] float32, in place.

        Returns:
            The status that octavo.attention.cpu.kernel.check_status knows, with step.attend.
        """
        num_threads = torch.get_num_threads()
        return self._run(
            self._layers, len(self._layers), step, hidden.data_ptr(), hidden.shape[1], num_threads
        )


def unsupported_reason(attention: AttentionLayer, feed_forward: object) -> str | None:
    """Return why a layer cannot be one of a stack, or None if it can."""
    if not isinstance(feed_forward, FeedForward):
        return "it has experts"
    if attention.wide_norm is not None:
        return "it norms queries and keys over all heads"
    inputs = ((attention.qkv_proj, None), (feed_forward.gate_up_proj, "silu"))
    if not all(_is_plain_input(block, activation) for block, activation in inputs):
        return "a norm, an activation or a weight is of another kind"
    if not all(_is_plain_output(block) for block in (attention.o_proj, feed_forward.down_proj)):
        return "an output has a norm, several ranks or a weight of another kind"
    return None


def make_stack(layers: Sequence[tuple[AttentionLayer, object]]) -> LayerStack | None:
    """Return the stack of a decoder's layers, or None if they have to be called one by one."""
    stacked = [
        (attention, feed_forward)
        for attention, feed_forward in layers
        if isinstance(feed_forward, FeedForward) and unsupported_reason(attention, feed_forward) is None
    ]
    return LayerStack(stacked) if len(stacked) == len(layers) else None


def _is_plain_input(block: BlockInput, activation: str | None) -> bool:
    if not isinstance(block, PlainInput) or block.activation != activation:
        return False
    weight = block.norm.weight
    is_float = weight.dtype == torch.float32 and weight.is_contiguous()
    return is_float and _compiled(block.projection) is not None


def _is_plain_output(block: BlockOutput) -> bool:
    if not isinstance(block, PlainOutput) or block.norm is not None or block.parallel.size > 1:
        return False
    return _compiled(block.projection) is not None


def _compiled(projection: object) -> int | None:
    """Return the address of a linear layer as C knows it, or None if C does not."""
    linear = projection.compiled if isinstance(projection, BlockLinear) else None
    return None if linear is None else linear.address


def _weights(attention: AttentionLayer, feed_forward: FeedForward) -> Iterator[TiledBlocks]:
    for block in (attention.qkv_proj, attention.o_proj, feed_forward.gate_up_proj, feed_forward.down_proj):
        assert isinstance(block, PlainInput | PlainOutput)
        assert isinstance(block.projection, BlockLinear)
        yield from block.projection.weights


def _describe(attention: AttentionLayer, feed_forward: FeedForward) -> _Layer:
    qkv, o, options = attention.qkv_proj, attention.o_proj, attention.options
    gate_up, down, head_norm = feed_forward.gate_up_proj, feed_forward.down_proj, options.qk_norm
    assert isinstance(qkv, PlainInput)
    assert isinstance(gate_up, PlainInput)
    assert isinstance(o, PlainOutput)
    assert isinstance(down, PlainOutput)
    return _Layer(
        *(_compiled(block.projection) for block in (qkv, o, gate_up, down)),
        *(norm.weight.data_ptr() for norm in (qkv.norm, gate_up.norm)),
        None if head_norm is None else head_norm.weight.data_ptr(),
        *(options.layer, options.rope, options.window or 0),
        *(qkv.norm.eps, gate_up.norm.eps, 0.0 if head_norm is None else head_norm.eps),
        *(options.scale, options.softcap),
    )


@cache
def _run_layers() -> "ctypes._CFuncPtr":
    function = layers_library().octavo_run_layers
    function.argtypes = [_POINTER, _INT, ctypes.POINTER(StackStep), _POINTER, _INT, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
