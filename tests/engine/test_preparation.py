"""What an engine on a GPU does before it is ready: how it goes about captures."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

from tiny_model import TINY_LLAMA

from octavo.config import EngineConfig
from octavo.engine.gpu.prepare import Preparation
from octavo.engine.memory import plan_execution
from octavo.models import ModelConfig


class Graphs:
    """Notes whether Python may collect garbage while a graph is captured."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.collects: list[bool] = []
        self._fails_at = fails_at

    def variants(self) -> Iterator[int]:
        return iter(range(3))

    def capture(self, variant: int) -> None:
        self.collects.append(gc.isenabled())
        if variant == self._fails_at:
            raise RuntimeError("no memory for this graph")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Preparation of such graphs, without what needs a device."""
    monkeypatch.setattr(Preparation, "_reserve", lambda self: None)
    plan = plan_execution(EngineConfig(model="x", num_blocks=64), ModelConfig.from_hf(TINY_LLAMA))
    return lambda *kinds: Preparation(kinds, plan)


def test_nothing_is_collected_between_captures(prepared: Any) -> None:
    first, second = Graphs(), Graphs()
    told: list[tuple[str, int, int]] = []
    prepared(first, second).capture(lambda *progress: told.append(progress))
    assert first.collects + second.collects == [False] * 6
    assert told[-1] == ("capturing CUDA graphs", 6, 6)
    assert gc.isenabled()


def test_collections_go_on_after_a_capture_that_failed(prepared: Any) -> None:
    graphs = Graphs(fails_at=1)
    with pytest.raises(RuntimeError, match="no memory"):
        prepared(graphs).capture(lambda *progress: None)
    assert graphs.collects == [False, False]
    assert gc.isenabled()
