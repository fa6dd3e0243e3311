"""The specification of octavo.ops against the dense oracle."""

import pytest
import torch
from kvcache_cases import kvcache_case
from ops_cases import Maker, dense_case, varlen_case
from test_ops_matrix import check

from octavo.ops import run_call
from octavo.ops import specification as reference


@pytest.mark.parametrize("kind", [kvcache_case, varlen_case, dense_case])
@pytest.mark.parametrize("seed", range(700_000, 700_012))
def test_the_specification_agrees_with_the_oracle(monkeypatch, kind, seed):
    monkeypatch.setattr(run_call, "attend", reference.attend)
    check(kind(Maker(seed, "cpu", (torch.float32, torch.float64))))
