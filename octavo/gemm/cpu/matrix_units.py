"""What a CPU has for products in bfloat16, and which products are then the fastest."""

from pathlib import Path

import torch

from octavo.gemm.cpu.library import compile_failure

# By the CPU's units: for more rows, what multiplies many of them is faster than the C kernel.
FEW_ROWS = {"AMX": 16, "AVX512-BF16": 12, None: 32}
_CPUINFO = Path("/proc/cpuinfo")


def matrix_units() -> str | None:
    """Return the name of this CPU's instructions for products in bfloat16, or None: it has none."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else None


def outruns_float32() -> bool:
    """Return whether products in bfloat16 were measured to be faster than in float32 on CPUs like this one.

    They were with AMX, and with AVX512-BF16 on AMD's; Intel's have half of float32's rate without AMX.
    """
    units = matrix_units()
    return units == "AMX" or (units == "AVX512-BF16" and is_amd())


def is_amd() -> bool:
    """Return whether the CPU is AMD's, as far as the system says."""
    try:
        return "AuthenticAMD" in _CPUINFO.read_text(errors="replace")
    except OSError:
        return False


def few_rows() -> int:
    """Return how many rows are multiplied in C at most, if there is a compiler."""
    return FEW_ROWS[matrix_units()]


def describe() -> str:
    """Say how weights in bfloat16 are multiplied here."""
    units = matrix_units()
    many = "made float32 in each GEMM" if units is None else f"by oneDNN in bfloat16 ({units})"
    return many if compile_failure() else f"{many}; up to {few_rows()} rows by the C kernel in float32"
