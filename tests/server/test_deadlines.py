"""One timer for many time limits: each in time, in order, and not once it has ended."""

import asyncio
import time
from functools import partial

from event_stream_helpers import run

from octavo.server.limits import Deadlines


def test_calls_what_has_not_ended() -> None:
    async def test() -> None:
        called: list[tuple[str, float]] = []
        deadlines, begun = Deadlines(0.05), time.monotonic()

        def note(name: str) -> None:
            called.append((name, time.monotonic() - begun))

        first, second = (deadlines.begin(partial(note, name)) for name in "ab")
        await asyncio.sleep(0.02)
        third = deadlines.begin(partial(note, "c"))
        deadlines.end(second)
        deadlines.end(second)
        await asyncio.sleep(0.2)
        assert [name for name, _ in called] == ["a", "c"]
        assert called[0][1] >= 0.05
        assert called[1][1] >= 0.07
        deadlines.end(first)
        deadlines.end(third)
        # Again, after a time with nothing to do.
        deadlines.begin(partial(note, "d"))
        deadlines.end(deadlines.begin(partial(note, "e")))
        await asyncio.sleep(0.1)
        assert [name for name, _ in called] == ["a", "c", "d"]

    run(test)


def test_what_ends_just_before_it_is_called_is_not_called() -> None:
    """Trap: a stream that ended then began to look again, and was kept for ever."""

    async def test() -> None:
        called: list[str] = []
        deadlines = Deadlines(0.01)
        number = deadlines.begin(partial(called.append, "a"))
        deadlines.begin(partial(called.append, "b"))
        time.sleep(0.02)
        deadlines._look()
        deadlines.end(number)
        await asyncio.sleep(0.03)
        assert called == ["b"]

    run(test)


def test_a_call_may_begin_another() -> None:
    async def test() -> None:
        deadlines, num_called = Deadlines(0.01), 0

        def again() -> None:
            nonlocal num_called
            num_called += 1
            deadlines.begin(again)

        deadlines.begin(again)
        await asyncio.sleep(0.1)
        assert 2 <= num_called <= 10

    run(test)


def test_one_timer_for_all() -> None:
    async def test() -> None:
        events, num_timers = asyncio.get_running_loop(), 0
        call_later = events.call_later

        def counted(*arguments: object) -> object:
            nonlocal num_timers
            num_timers += 1
            return call_later(*arguments)  # type: ignore[arg-type]

        events.call_later = counted  # type: ignore[method-assign, assignment]
        deadlines = Deadlines(60)
        for _ in range(100):
            deadlines.end(deadlines.begin(lambda: None))
        assert num_timers == 1

    run(test)


def test_another_event_loop() -> None:
    deadlines, called = Deadlines(0.01), []

    async def begin() -> None:
        deadlines.begin(partial(called.append, 1))

    async def wait() -> None:
        await begin()
        await asyncio.sleep(0.1)

    run(begin)
    run(wait)
    assert called == [1, 1]


def test_a_call_that_fails_is_not_the_others_failure() -> None:
    async def test() -> None:
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        deadlines, called = Deadlines(0.01), []
        deadlines.begin(partial(called.remove, 2))
        deadlines.begin(partial(called.append, 1))
        await asyncio.sleep(0.1)
        assert called == [1]
        assert len(failures) == 1

    run(test)
