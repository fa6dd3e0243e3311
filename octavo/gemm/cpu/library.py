"""The C library of the layers, compiled on first use."""

import ctypes
from functools import cache
from pathlib import Path

from octavo.attention.cpu.c_calls import ATTENTION
from octavo.kernels.c.compiler import KernelUnavailableError, Library, load_library

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_FOLDER = Path(__file__).parent / "c"
_SOURCES = ("bfloat16.c", "blocks.c", "experts.c", "float8.c", "layers.c", "stack.c", "tiles.c")
_LIBRARY = Library(
    "layers",
    (
        *(_FOLDER / name for name in _SOURCES),
        *ATTENTION.sources,
    ),
    (
        *(_FOLDER / name for name in ("blocks.h", "dots.c", "experts.h", "few.c", "layers.h", "rows.c")),
        *ATTENTION.included,
    ),
)


@cache
def compile_failure() -> str | None:
    """Return why the library cannot be compiled here, or None if it can; compiles it in the first call."""
    try:
        layers_library()
    except KernelUnavailableError as error:
        # octavo.attention meets the same obstacle and tells the user.
        return str(error)
    return None


@cache
def layers_library() -> ctypes.CDLL:
    """Return the library; compiles it in the first call of a process.

    Raises:
        KernelUnavailableError: it cannot be compiled.
    """
    library = load_library(_LIBRARY)
    library.octavo_bfloat16_linear.argtypes = [*[_POINTER] * 4, *[_INT] * 3, ctypes.c_int]
    library.octavo_bfloat16_linear.restype = None
    library.octavo_float8_linear.argtypes = [
        *[_POINTER] * 2,
        *[_INT] * 2,
        *[_POINTER] * 3,
        *[_INT] * 3,
        ctypes.c_int,
    ]
    library.octavo_float8_linear.restype = None
    library.octavo_float8_rows.argtypes = [*[_POINTER] * 2, *[_INT] * 5, _POINTER, ctypes.c_int]
    library.octavo_float8_rows.restype = None
    library.octavo_block_linear.argtypes = [*[_POINTER] * 3, *[_INT] * 3, ctypes.c_int]
    library.octavo_block_linear.restype = ctypes.c_int
    library.octavo_tile.argtypes = []
    library.octavo_tile.restype = ctypes.c_int
    library.octavo_tile_blocks.argtypes = [_POINTER, *[_INT] * 4, *[_POINTER] * 3]
    library.octavo_tile_blocks.restype = None
    library.octavo_tile_codes.argtypes = [*[_POINTER] * 2, *[_INT] * 2, *[_POINTER] * 2]
    library.octavo_tile_codes.restype = None
    library.octavo_run_layers.argtypes = [_POINTER, _INT, _POINTER, _POINTER, _INT, ctypes.c_int]
    library.octavo_run_layers.restype = ctypes.c_int
    library.octavo_run_experts.argtypes = [_POINTER, _POINTER, ctypes.c_int]
    library.octavo_run_experts.restype = ctypes.c_int
    library.octavo_add_rms_norm.argtypes = [*[_POINTER] * 4, _INT, _INT, ctypes.c_float, ctypes.c_int]
    library.octavo_add_rms_norm.restype = None
    library.octavo_silu_and_multiply.argtypes = [_POINTER, _POINTER, _INT, _INT, ctypes.c_int]
    library.octavo_silu_and_multiply.restype = None
    return library
