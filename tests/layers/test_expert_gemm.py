"""The persistent GEMM of MXFP4 experts on a CPU: when it runs, and the kernel as compiled."""

from pathlib import Path

import pytest
import torch
from chosen_products import expert_product_name, take_for_hopper
from compiled_figures import compiled_figures

from octavo.errors import InvalidArgumentError
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight, num_spans
from octavo.gemm.hopper.mxfp4 import mxfp4_rows_tiling as tiling
from octavo.gemm.hopper.mxfp4.mxfp4_rows_tiling import (
    Mxfp4ManyTiling,
    make_tiling,
    mxfp4_many_tiling_for,
    unsupported_reason,
)

pytestmark = pytest.mark.compiled
# Of an SM, less what the system takes of it for each program.
SHARED_BYTES, SYSTEM_BYTES = 228 * 1024, 1024
ROWS = torch.zeros(200, 256, dtype=torch.bfloat16)


def weight(rows: int = 64, columns: int = 256) -> Mxfp4ExpertWeight:
    sizes = 4, num_spans(columns), rows
    words = torch.zeros(*sizes, 16, dtype=torch.int32)
    return Mxfp4ExpertWeight(columns, words, torch.zeros(sizes, dtype=torch.int32))


def test_the_kernel_spills_nothing_and_its_programs_fit_an_sm() -> None:
    figures = compiled_figures(Path(__file__).with_name("compile_expert_gemm.py"))
    assert len(figures) == 6
    for name, facts in figures.items():
        assert facts["stack"] == facts["spills"] == 0, name
        # Two atoms of four products, and none of them waits for itself.
        assert (facts["products"], facts["waits"]) == (8, 3), name
        assert facts["programs"] * (facts["shared"] + SYSTEM_BYTES) <= SHARED_BYTES, name
        # The warps that multiply, and the one that fetches, which counts as four.
        assert facts["programs"] * 12 * 32 * facts["registers"] <= 65536, name


def test_tilings() -> None:
    assert [mxfp4_many_tiling_for(rows).rows for rows in (1, 128, 129, 1000)] == [64, 64, 128, 128]
    assert make_tiling(64) == Mxfp4ManyTiling(64, 2, 4, 80)
    assert make_tiling(128) == Mxfp4ManyTiling(128, 1, 5, 168)


def test_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a Hopper GPU" in str(unsupported_reason(ROWS, weight()))
    take_for_hopper(monkeypatch, tiling)
    assert unsupported_reason(ROWS, weight()) is None
    for bad in ((ROWS.half(), weight()), (ROWS, weight(rows=72)), (ROWS, weight(columns=96))):
        assert "rows in bfloat16, N a multiple of 16 and K of 64" in str(unsupported_reason(*bad))

    def product(rows_per_expert: float, *weights: Mxfp4ExpertWeight, deterministic: bool = False) -> str:
        options = {"rows_per_expert": rows_per_expert, "deterministic": deterministic}
        return expert_product_name(ROWS, weights, 4, **options)

    assert product(48, weight(), weight()) == "grouped"
    assert product(49, weight(), weight()) == "persistent"
    assert product(49, weight(), weight(rows=72)) == "grouped"
    assert product(49, weight(), weight(), deterministic=True) == "grouped"


def test_other_devices_do_without_it() -> None:
    from octavo.gemm.hopper.mxfp4.mxfp4_persistent import expert_gemm

    with pytest.raises(InvalidArgumentError, match="the GEMM of experts cannot run: it needs a Hopper"):
        expert_gemm(ROWS, weight(), torch.zeros(1, 4, dtype=torch.int32), make_tiling(64))
