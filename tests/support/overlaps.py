"""Checks that kernels which overlap with the ones before them compute what they compute one by one."""

from typing import Protocol

import pytest
import torch
from torch import Tensor


class Chain(Protocol):
    """Kernels over one residual stream, each of which reads what the last one wrote."""

    hidden: Tensor

    def run(self) -> None:
        """Start over and launch all of them."""
        ...


def check_overlap(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that overlapping kernels give the same bits, in and out of a graph, as kernels one by one."""
    monkeypatch.setattr("octavo.kernels.launch.OVERLAP", False)
    chain.run()
    expected = chain.hidden.clone()
    assert expected.isfinite().all()
    monkeypatch.setattr("octavo.kernels.launch.OVERLAP", True)
    chain.run()
    assert torch.equal(chain.hidden, expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    for _ in range(50):
        chain.hidden.fill_(torch.nan)
        graph.replay()
        assert torch.equal(chain.hidden, expected)
