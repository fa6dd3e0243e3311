"""Loops around a tiny random model, and a browser that looks at one."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_helpers import Page, slow
from tiny_model import TINY_LLAMA

from octavo import EngineConfig
from octavo.engine.engine import Engine
from octavo.server.loop.engine_loop import EngineLoop

TINY_OPTIONS = {"num_blocks": 64, "block_size": 4, "prepare": False, "load_format": "dummy"}
CHROMIUM = os.environ.get("OCTAVO_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"


# For a module: while Playwright runs, its thread has an event loop, and other tests begin their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Headless Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page_server(tiny_engine: Callable[..., Engine], request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page, an engine at work with a pool of 512 blocks or a parameter's, and an API that obeys tests."""
    num_blocks = getattr(request, "param", 512)
    loop = EngineLoop(lambda: slow(tiny_engine(num_blocks=num_blocks, max_num_seqs=16)))
    loop.start()
    page = Page(loop)
    yield page
    page.stop()
    loop.stop()


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
