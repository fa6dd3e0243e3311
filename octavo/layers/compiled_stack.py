"""All layers of a decoder in one call into C, where their weights are in blocks.

Called layer by layer, a step of one token spends as much time in Python, and between parallel regions, as in
products.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.cpu.c_calls import AttendCall, StoreCall
from octavo.gemm.cpu.library import layers_library

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class StackLayer(ctypes.Structure):
    """Layer of stack.c. The caller keeps alive what it points to."""

    _fields_ = [
        *((name, _POINTER) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "feed_forward_norm", "head_norm")),
        *((name, _INT) for name in ("cache_layer", "rope", "window")),
        *((name, _FLOAT) for name in ("attention_eps", "feed_forward_eps", "head_eps", "scale", "softcap")),
    ]


class StackGroup(ctypes.Structure):
    """Group of stack.c: what a step means for layers with block tables of their own."""

    _fields_ = [("plan", _POINTER), ("attend", AttendCall), ("store", StoreCall)]


class StackPlace(ctypes.Structure):
    """Place of stack.c: the group of a layer of the cache, and where its keys and values begin."""

    _fields_ = [("group", _INT), ("keys", _POINTER), ("values", _POINTER)]


class StackStep(ctypes.Structure):
    """Step of stack.c. The caller keeps alive what it points to."""

    _fields_ = [
        *((name, _POINTER) for name in ("query_rotations", "key_rotations", "groups", "places")),
        # The group in which something is wrong, if it is.
        ("failed", _INT),
    ]


class LayerStack:
    """The layers of a decoder; windows: of each layer of the cache, None where a token sees all keys."""

    def __init__(self, layers: Sequence[StackLayer], alive: object) -> None:
        """Keep layers, and what they point to."""
        self._alive = alive
        self.windows = {(layer.cache_layer, layer.window or None) for layer in layers}
        self._layers = (StackLayer * len(layers))(*layers)
        self._run = layers_library().octavo_run_layers

    def __call__(self, hidden: Tensor, step: StackStep) -> int:
        """Run all layers over hidden [T, hidden] float32, in place.

        Returns:
            The status that octavo.attention.cpu.c_calls.check_status knows, of the group step.failed.
        """
        num_layers, num_threads = len(self._layers), torch.get_num_threads()
        address = hidden.data_ptr()
        return self._run(self._layers, num_layers, ctypes.byref(step), address, hidden.shape[1], num_threads)
