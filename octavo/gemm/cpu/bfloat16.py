"""Linear layers on CPUs whose weight is bfloat16, as most checkpoints store it; x, sums and y are float32.

rows of x           by                                                       activations
few, see _FEW_ROWS  C (gemm/cpu/c/few.c)                                     float32
more                oneDNN, on a CPU with units for bfloat16                 bfloat16
                    PyTorch on others: makes some outputs' weights float32   float32
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.gemm.cpu import compiled_rows as few
from octavo.gemm.cpu.library import compile_failure

# By the CPU's units; for more rows, what multiplies many of them is faster than the C kernel.
_FEW_ROWS = {"AMX": 16, "AVX512-BF16": 12, None: 32}
# Numbers of a weight that are float32 at a time: 4 MiB.
_CHUNK = 2**20
_CPUINFO = Path("/proc/cpuinfo")


def unsupported_reason(weight: Tensor) -> str | None:
    """Return why products with a weight cannot run so, or None if they can."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return f"it needs float32 or bfloat16 on a CPU, got {weight.dtype} on {weight.device}"
    return None


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
    return _FEW_ROWS[matrix_units()]


def describe() -> str:
    """Say how it multiplies here."""
    units = matrix_units()
    many = "made float32 in each GEMM" if units is None else f"by oneDNN in bfloat16 ({units})"
    return many if compile_failure() else f"{many}; up to {few_rows()} rows by the C kernel in float32"


class Bfloat16Linear:
    """y = x W^T + b with a weight in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep weight [out, in], rounded to bfloat16 if it is float32, and bias [out] float32."""
        self._weight = weight.bfloat16().contiguous()
        self._bias = bias
        self._has_units = matrix_units() is not None
        runs_in_c = few.unsupported_reason(len(weight)) is None
        self._few = few.CompiledFewRows.of_bfloat16(self._weight, bias) if runs_in_c else None
        self._few_rows = few_rows()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] float32 to [T, out] float32."""
        if self._few is not None and x.shape[0] <= self._few_rows:
            return self._few(x)
        if not self._has_units:
            return self._multiply_widened(x)
        out = linear(x.bfloat16(), self._weight).float()
        return out if self._bias is None else out.add_(self._bias)

    def _multiply_widened(self, x: Tensor) -> Tensor:
        num_outputs, size = self._weight.shape
        out = x.new_empty(x.shape[0], num_outputs)
        step = max(1, _CHUNK // size)
        for start in range(0, num_outputs, step):
            part = slice(start, start + step)
            torch.mm(x, self._weight[part].float().T, out=out[:, part])
        return out if self._bias is None else out.add_(self._bias)
