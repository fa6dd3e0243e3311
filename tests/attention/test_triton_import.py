"""What the attention room says of itself without Triton."""

import pytest
import torch

from octavo.attention import gpu_paged


def test_says_why_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "not torch.float64" in gpu_paged.unsupported_reason("cuda", torch.float64)
    assert "not torch.float8_e5m2" in gpu_paged.unsupported_reason("cuda", torch.float8_e5m2)
    assert "not for mps" in gpu_paged.unsupported_reason("mps", torch.float16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in gpu_paged.unsupported_reason("cuda", torch.float16)


def test_the_interpreter_runs_float32_on_a_cpu(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gpu_paged.unsupported_reason("cpu", torch.float32) is None
    assert "bfloat16" in gpu_paged.unsupported_reason("cpu", torch.bfloat16)
    assert "float8" in gpu_paged.unsupported_reason("cpu", torch.float8_e4m3fn)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "NVIDIA" in gpu_paged.unsupported_reason("cpu", torch.float32)
