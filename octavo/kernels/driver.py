"""Device memory that several processes map, by NVIDIA's driver itself.

PyTorch shares tensors too, but counts their users in files that a killed process leaves behind; and its
symmetric memory numbers rendezvous by process, so a process with a second engine never meets a fresh rank.
"""

import ctypes
from functools import cache
from typing import Any

# Let the current GPU access the memory of the GPU that owns it.
_ENABLE_PEER_ACCESS = 1
HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


def allocate(num_bytes: int) -> int:
    """Allocate memory of the current device, all zero, and return its address.

    Raises:
        RuntimeError: the driver refused.
    """
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
    _call("cuCtxSynchronize")
    return address.value


def export(address: int) -> bytes:
    """Return a handle of allocated memory, HANDLE_BYTES long, by which other processes map it.

    Raises:
        RuntimeError: the driver refused.
    """
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """Map another process' memory for the current device, and return its address here.

    Raises:
        RuntimeError: the driver refused.
    """
    address = ctypes.c_uint64()
    own = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), own, ctypes.c_uint(_ENABLE_PEER_ACCESS))
    return address.value


def close_handle(address: int) -> None:
    """Unmap another process' memory."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def free(address: int) -> None:
    """Free allocated memory."""
    _call("cuMemFree_v2", ctypes.c_uint64(address))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
