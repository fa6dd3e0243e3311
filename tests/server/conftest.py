"""Loops around a tiny random model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_model import TINY_LLAMA

from octavo import EngineConfig
from octavo.engine.engine import Engine
from octavo.server.loop.engine_loop import EngineLoop

TINY_OPTIONS = {"num_blocks": 64, "block_size": 4, "prepare": False, "load_format": "dummy"}


@pytest.fixture
def tiny_engine(tmp_path: Path) -> Callable[..., Engine]:
    """Make an engine of a tiny random model; it has no tokenizer."""

    def make(**options: object) -> Engine:
        (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
        return Engine(EngineConfig.from_dict({"model": str(tmp_path), **TINY_OPTIONS, **options}))

    return make


@pytest.fixture
def start_loop(tiny_engine: Callable[..., Engine]) -> Iterator[Callable[..., EngineLoop]]:
    """Start a loop around a tiny engine; `limits` go to the loop, options to the engine."""
    loops: list[EngineLoop] = []

    def start(limits: dict | None = None, **options: object) -> EngineLoop:
        loop = EngineLoop(lambda: tiny_engine(**options), **(limits or {}))
        loops.append(loop)
        loop.start()
        return loop

    yield start
    for loop in loops:
        loop.stop()
