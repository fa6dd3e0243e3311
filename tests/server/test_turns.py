"""Threads that senders use in turns."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from octavo.server.api_errors import ApiError
from octavo.server.reading.fair_threads import FairThreads


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_senders_hundred_pieces_hold_up_nobody_elses_one() -> None:
    async def run() -> None:
        turns, may_end = FairThreads(2, "test"), threading.Event()
        order: list[str] = []

        def work(name: str) -> str:
            if name.startswith("greedy"):
                may_end.wait(60)
            order.append(name)
            return name

        greedy = [asyncio.ensure_future(turns.run(b"g", work, f"greedy {n}")) for n in range(100)]
        await settle()
        # One thread is left for others, though nothing of the first sender has ended.
        assert await turns.run(b"a", work, "other") == "other"
        late = [
            asyncio.ensure_future(turns.run(sender, work, sender.decode())) for sender in (b"a", b"b", b"c")
        ]
        assert [await one for one in late] == ["a", "b", "c"]
        assert order == ["other", "a", "b", "c"]
        may_end.set()
        assert await asyncio.gather(*greedy) == [f"greedy {n}" for n in range(100)]
        await until(lambda: not turns._running)
        assert not turns._waiting
        turns.close()

    asyncio.run(run())


def test_senders_take_turns_whatever_each_has_sent() -> None:
    async def run() -> None:
        turns, may_end = FairThreads(1, "test"), threading.Event()
        order: list[str] = []
        first = asyncio.ensure_future(turns.run(b"x", may_end.wait, 60))
        await settle()
        waiting = []
        for sender in ("a", "a", "a", "a", "b", "b", "c"):
            waiting.append(asyncio.ensure_future(turns.run(sender.encode(), order.append, sender)))
            await settle()
        may_end.set()
        await asyncio.gather(first, *waiting)
        assert "".join(order) == "abcabaa"
        turns.close()

    asyncio.run(run())


def test_work_that_nobody_waits_for_keeps_its_thread_until_it_ends() -> None:
    async def run() -> None:
        turns, may_end = FairThreads(2, "test"), threading.Event()
        for _ in range(50):
            # Clients that leave do not get more threads by coming again.
            task = asyncio.ensure_future(turns.run(b"a", may_end.wait, 60))
            await settle()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (turns._running[b"a"], turns._waiting) == (1, {})
        may_end.set()
        await until(lambda: not turns._running)
        assert await turns.run(b"a", int, "5") == 5
        turns.close()

    asyncio.run(run())


def test_a_full_room_takes_from_who_has_most() -> None:
    async def run() -> None:
        turns, may_end = FairThreads(1, "test"), threading.Event()
        greedy = []

        async def enter(sender: bytes, num_bytes: int) -> object:
            turns.make_room(sender, num_bytes, 50)
            return await turns.run(sender, may_end.wait, 60, num_bytes=num_bytes)

        # The first one runs, and five wait.
        for _ in range(6):
            greedy.append(asyncio.ensure_future(enter(b"g", 10)))
            await settle()
        for sender, num_bytes in ((b"g", 1), (b"a", 50)):
            with pytest.raises(ApiError) as refused:
                await enter(sender, num_bytes)
            assert refused.value.status == 429
        other = asyncio.ensure_future(enter(b"a", 15))
        await settle()
        assert all(isinstance(one.exception(), ApiError) for one in greedy[-2:])
        assert not any(one.done() for one in greedy[:-2])
        # What they leave is anybody's.
        small = asyncio.ensure_future(enter(b"g", 5))
        await settle()
        may_end.set()
        assert all(await asyncio.gather(other, small, *greedy[:-2]))
        assert not turns._waiting
        turns.close()

    asyncio.run(run())


def test_an_error_is_the_callers_and_frees_the_thread() -> None:
    async def run() -> None:
        turns = FairThreads(1, "test")
        for _ in range(3):
            with pytest.raises(ValueError, match="invalid literal"):
                await turns.run(b"a", int, "x")
        await until(lambda: not turns._running)
        turns.close()
        with pytest.raises(RuntimeError):
            await turns.run(b"a", int, "5")
        assert not turns._running

    asyncio.run(run())
