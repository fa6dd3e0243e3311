"""What portable products are compiled to for GPUs of two generations, without any."""

from pathlib import Path

import pytest
from compiled_figures import compiled_figures

pytest.importorskip("triton")


@pytest.mark.parametrize(
    # Compute capability -> bytes of shared memory that a program of such a GPU can have. Those of RTX cards
    # and an L40S (8.6, 8.9) are less than an A100's 163 KiB (8.0).
    ("capability", "most_shared"),
    [(80, 99 * 1024), (90, 227 * 1024)],
)
def test_nothing_spills_and_all_fits_the_smallest_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: int, most_shared: int
) -> None:
    monkeypatch.setenv("COMPILED_CAPABILITY", str(capability))
    found = compiled_figures(Path(__file__).with_name("compile_portable_gemm.py"))
    assert len(found) == 28
    for name, figures in found.items():
        assert figures["stack"] == 0, name
        assert figures["shared"] <= most_shared, name
