"""Kernels for heads of 512 fit the registers and shared memory of GPUs with much of it and with little."""

import importlib.util
from pathlib import Path

import pytest
from compiled_figures import compiled_figures

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.mark.parametrize(("capability", "shared_bytes"), [(90, 227 * 1024), (89, 99 * 1024)])
def test_kernels_fit_a_program(monkeypatch, capability, shared_bytes):
    """What 64 rows keep between their loops may spill, more of it in float8, where values are two tensors."""
    monkeypatch.setenv("COMPILED_CAPABILITY", str(capability))
    found = compiled_figures(Path(__file__).with_name("compile_wide_heads.py"))
    assert len(found) == 13
    for name, used in found.items():
        assert used["shared"] <= shared_bytes, name
        is_prompt = name.startswith(("prefill", "nodes"))
        most = 40 if not is_prompt else 700 if "float8" in name else 256
        assert used["stack"] <= most, f"{name}: {used}"
