"""A fixture for tests of C kernels: each runs as compiled for this CPU, and for others."""

import platform
from collections.abc import Iterator

import pytest

from octavo.gemm.cpu.library import layers_library
from octavo.kernels.c import compiler as compiling

# Kinds of CPUs, what this one needs to run their code, and how GCC calls one that has no more.
KINDS = {
    "this CPU": ((), None),
    "any CPU": ((), "x86-64" if platform.machine() in ("x86_64", "AMD64") else "armv8-a"),
    "AVX2": (("avx2", "fma", "f16c", "bmi2", "movbe"), "x86-64-v3"),
    "AVX-512": (("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"), "skylake-avx512"),
    "AVX-VNNI": (("avx_vnni", "gfni", "vaes"), "alderlake"),
}


@pytest.fixture(params=KINDS, autouse=True)
def for_kinds_of_cpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels for this machine's CPU, and those for others: without AVX2, without dot products ..."""
    needed, name = KINDS[request.param]
    if not set(needed) <= set(compiling._describe_cpu("cc").split()):
        pytest.skip(f"this CPU lacks one of {needed}")
    if name is not None:
        monkeypatch.setattr(compiling, "_machine_flag", lambda: f"-march={name}")
    layers_library.cache_clear()
    yield
    layers_library.cache_clear()
