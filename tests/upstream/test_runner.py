"""The runner of other projects' tests, on a small project of our own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The runner is used by hand, with a GPU; each test starts processes that import PyTorch.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
UPSTREAM = """
import pytest
import torch
from flash_attn import flash_attn_with_kvcache
from flash_attn.flash_attn_interface import USE_TRITON_ROCM
assert torch.cuda.get_device_capability("cuda") == (9, 0)

@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 4), (2, 5), (3, 2)])
@pytest.mark.parametrize("d", [8, 16])
@pytest.mark.parametrize("wrong", [False, True])
def test_flash_attn_kvcache(wrong, d, seqlen_q, seqlen_k, dtype):
    if seqlen_q > seqlen_k:
        pytest.skip("too long")
    q = torch.ones(1, seqlen_q, 1, d, device="cuda", dtype=dtype)
    k = torch.ones(1, seqlen_k, 1, d, device="cuda", dtype=dtype)
    print("much")
    assert flash_attn_with_kvcache(q, k, k + wrong).max() == 1, "not one"

@pytest.mark.parametrize("dtype", [torch.float16])
def test_flash_attn_varlen_paged_kv_num_splits(dtype):
    raise AssertionError
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the runner on a checkout with one file."""
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_flash_attn.py").write_text(UPSTREAM)
    command = [sys.executable, str(HERE / "run.py"), "--flash-attention", str(folder), "--device", "cpu"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=dict(os.environ))


def test_cases_are_run_and_counted(tmp_path: Path) -> None:
    done = run(tmp_path, "--suite", "fa2-kvcache", "--suite", "fa2-splits", "--jobs", "2")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "fa2-kvcache  4 failed, 4 passed, 4 skipped"
    assert sum("FAILED {" in line and "'wrong': True" in line for line in lines) == 4
    assert sum("AssertionError: not one" in line for line in lines) == 4
    assert "fa2-splits   1 excepted" in lines
    assert "much" not in done.stdout


def test_a_sample_repeats_and_can_be_narrowed(tmp_path: Path) -> None:
    arguments = ("--suite", "fa2-kvcache", "--cases", "2", "--where", "wrong and seqlen_q < seqlen_k")
    first, second = (run(tmp_path, *arguments).stdout.splitlines()[:-1] for _ in range(2))
    assert first == second
    assert first[0] == "fa2-kvcache  2 failed"
    counted = run(tmp_path, "--suite", "fa2-kvcache", "--list", "--where", "not wrong")
    assert counted.stdout.startswith("fa2-kvcache  6 collected")
    assert counted.returncode == 0


def test_text_that_is_to_be_changed_must_be_there(tmp_path: Path) -> None:
    done = run(tmp_path, "--suite", "fa2-varlen")
    assert done.returncode == 1
    assert "does not have 'torch.autograd.grad(' any more" in done.stderr


def test_no_case_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "--suite", "fa2-kvcache", "--where", "d > 16")
    assert done.returncode == 1
    assert "no case ran" in done.stdout


def test_a_suite_needs_its_checkout(tmp_path: Path) -> None:
    assert "no checkout given: --vllm PATH" in run(tmp_path, "--suite", "vllm").stderr
