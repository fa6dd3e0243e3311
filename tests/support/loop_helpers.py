"""What tests of the loop share."""

import asyncio
import threading
import time
from collections.abc import Callable

from octavo.engine.engine import Engine
from octavo.outputs import CompletionDelta
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.loop.output_stream import Stream


def pace(engine: Engine, step_s: float = 0.05) -> None:
    """Let every step take at least so long: who looks late finds requests still under way."""
    step = type(engine).step

    def paced() -> None:
        time.sleep(step_s)
        step(engine)

    engine.step = paced  # type: ignore[method-assign]


def hurry(engine: Engine) -> None:
    """Let steps take no longer than they need."""
    del engine.step


def stop_after_a_step(engine: Engine) -> threading.Event:
    """Let one step run, and the next ones once the event is set."""
    step, go_on = type(engine).step, threading.Event()

    def stopping() -> None:
        engine.step = held  # type: ignore[method-assign]
        step(engine)

    def held() -> None:
        assert go_on.wait(60), "nobody let it go on"
        hurry(engine)
        step(engine)

    engine.step = stopping  # type: ignore[method-assign]
    return go_on


async def collect(stream: Stream) -> list[CompletionDelta]:
    """Read a stream to its end."""
    return [delta async for deltas in stream for delta in deltas]


def texts_of(deltas: list[CompletionDelta], num_completions: int = 1) -> list[str]:
    return [
        "".join(delta.text for delta in deltas if delta.index == index) for index in range(num_completions)
    ]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.002)


async def assert_drained(loop: EngineLoop) -> None:
    """No request is left anywhere, and every block is free."""
    await until(lambda: loop.stats().num_live == 0)
    stats = await loop.call(lambda engine: engine.stats())
    assert stats.num_running == stats.num_waiting == stats.kv.num_referenced == 0
    assert loop.stats().num_waiting == loop.stats().num_waiting_tokens == 0
    await loop.call(lambda engine: engine.manager.check_invariants())
