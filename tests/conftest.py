"""Fixtures every room's tests share."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import patience
import pytest

# Two test processes share the machine: threads of one would spin against the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that runs tests in the background has them, and all that they start, ignore Ctrl-C.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    import interpreted_triton

    interpreted_triton.patch()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Wait for a test as long as it works; pytest-timeout itself goes by the clock."""
    patience.set_timer(item, settings)
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs compiled kernels where Triton's interpreter is on, as it is once a file needs it."""
    if item.get_closest_marker("compiled") and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter is on: tests/layers/test_compiled.py runs it")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the modules that tests import out of garbage collections: they stay, and there are many."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def load_once() -> Callable[..., Any]:
    """octavo's load_decoder, which loads each network once in a process of tests."""
    from octavo.models import load_decoder

    loaded: dict[str, Any] = {}

    def load(config: Any, weights: Any, **options: Any) -> Any:
        options.pop("progress", None)
        key = repr((config, sorted(options.items())))
        if key not in loaded:
            loaded[key] = load_decoder(config, weights, **options)
        return loaded[key]

    return load


@pytest.fixture
def loads_once(monkeypatch: pytest.MonkeyPatch, load_once: Callable[..., Any]) -> None:
    """Engines share their networks: nearly all that is run with a real one is run with the same two."""
    monkeypatch.setattr("octavo.models.load_decoder", load_once)
    monkeypatch.setattr("octavo.engine.runner_setup.load_decoder", load_once)
