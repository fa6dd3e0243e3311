"""Kernels of blocks as compiled for 64-bit Arm, emulated: they compute what this machine's do.

Needs a cross compiler and an emulator: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
"""

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.gemm.cpu import library
from octavo.gemm.cpu.block_linear import BlockLinear, make_layer
from octavo.kernels.c.compiler import FLAGS
from octavo.layers.experts import ListedExperts
from octavo.layers.router import route_by_logits
from octavo.models.formats.gguf.gguf_blocks import read_as_stored

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = pytest.mark.skipif(
    library.compile_failure() is not None or not all(map(shutil.which, (COMPILER, EMULATOR))),
    reason="needs a compiler for Arm and an emulator",
)
# What compilers write for CPUs without and with dot products, and with vectors of any length.
KINDS = ("armv8-a", "armv8.2-a+dotprod", "armv9-a")
# Bits, bytes of a scale, minimums.
FORMS = {"Q4_1": (4, 2, 1), "Q8_0": (8, 2, 0), "MXFP4": (4, 1, 0)}


@dataclass
class Cases:
    """What the program reads, and what it has to write."""

    data: bytes
    expected: list[Tensor]


def random_blocks(form: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    bits, scale_bytes, has_mins = FORMS[form]
    sizes = rows, columns // 32, 4 * bits + scale_bytes + 2 * has_mins
    stored = torch.randint(256, sizes, generator=generator, dtype=torch.uint8)
    if form == "MXFP4":
        stored[:, :, 0] = 118 + stored[:, :, 0] % 8
    else:
        floats = torch.randn(rows, columns // 32, 1 + has_mins, generator=generator) / 20
        stored[:, :, : 2 + 2 * has_mins] = floats.half().view(torch.uint8)
    return stored


def layer(form: str, stored: Tensor) -> BlockLinear:
    return make_layer([read_as_stored(form, stored)], None)


@pytest.fixture(scope="module")
def cases() -> Cases:
    generator = torch.Generator().manual_seed(0)
    made = Cases(b"", [])
    for form, sizes in FORMS.items():
        for rows, columns, tokens in ((8, 32, 1), (19, 96, 3), (40, 512, 9), (100, 2880, 1), (33, 64, 40)):
            stored, x = random_blocks(form, rows, columns, generator), torch.randn(tokens, columns)
            made.data += struct.pack("<9q", 0, *sizes, rows, columns, tokens, 0, 0)
            made.data += stored.numpy().tobytes() + x.numpy().tobytes()
            made.expected.append(layer(form, stored)(x))
    for is_clamped, activation in enumerate(("silu", "clamped_swiglu")):
        for tokens, k, number, hidden, inner in ((1, 2, 4, 64, 96), (7, 4, 6, 2880, 64), (30, 3, 5, 96, 64)):
            pairs = [
                (
                    random_blocks("MXFP4", 2 * inner, hidden, generator),
                    random_blocks("MXFP4", hidden, inner, generator),
                )
                for _ in range(number)
            ]
            x = torch.randn(tokens, hidden)
            choice = route_by_logits(torch.randn(tokens, number), k, renormalises=True)
            sizes = number, *FORMS["MXFP4"], hidden, inner, tokens, k, is_clamped
            made.data += struct.pack("<9q", *sizes)
            made.data += b"".join(each.numpy().tobytes() for pair in pairs for each in pair)
            made.data += b"".join(each.numpy().tobytes() for each in (x, *choice))
            layers = ([layer("MXFP4", each) for each in stored] for stored in zip(*pairs, strict=True))
            made.expected.append(ListedExperts(*layers, activation)(x, choice))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_emulated_kernels_compute_the_same(kind: str, cases: Cases, tmp_path: Path) -> None:
    program, given, written = (tmp_path / name for name in ("program", "given", "written"))
    folder = Path(library.__file__).parent
    sources = [*library._LIBRARY.sources, Path(__file__).with_name("arm_kernels.c")]
    command = [COMPILER, *FLAGS, f"-march={kind}", f"-I{folder}", *map(str, sources)]
    subprocess.run([*command, "-static", "-lm", "-o", str(program)], check=True, capture_output=True)
    given.write_bytes(cases.data)
    subprocess.run([EMULATOR, "-cpu", "max", str(program), str(given), str(written)], check=True)
    found = torch.from_numpy(np.fromfile(written, np.float32))
    parts = found.split([each.numel() for each in cases.expected])
    for part, expected in zip(parts, cases.expected, strict=True):
        error = (part.view(expected.shape) - expected).abs().max()
        assert error <= 1e-6 * expected.abs().max()
