"""Runs a coroutine without a task for as long as it need not wait."""

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any

_NOTHING = object()


def begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run work up to where it has to wait; return None if it is done, else a task that does the rest.

    What Python 3.12 calls an eager task, but for two things: the work must not ask for its task before it
    waits, and a task that is cancelled while it first waits closes the work instead of raising in it.
    """
    steps = work.__await__()
    waits_for = next(steps, _NOTHING)
    return None if waits_for is _NOTHING else asyncio.ensure_future(_rest(waits_for, steps))


@coroutine
def _rest(waits_for: Any, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    try:
        # asyncio waits for what a coroutine yields.
        yield waits_for
        yield from steps
    finally:
        steps.close()
