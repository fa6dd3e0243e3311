"""Sums over ranks on GPUs: what check_sums.py finds, in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two NVIDIA GPUs are needed"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[str]]]:
    """What each rank found wrong, by check."""
    command = [sys.executable, str(Path(__file__).with_name("check_sums.py")), "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_gpus_share_memory(found: dict[str, list[list[str]]]) -> None:
    assert all(way[0].startswith("one-shot up to") for way in found["way"])


@pytest.mark.parametrize(
    "check",
    ["check_sizes", "check_norm", "check_equal_bits", "check_order", "check_replays", "check_lost_rank"],
)
def test_sums_are_right(found: dict[str, list[list[str]]], check: str) -> None:
    assert found[check] == [[], []]
