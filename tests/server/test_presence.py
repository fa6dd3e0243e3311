"""A client that leaves takes the work for it along, at any moment, and only that."""

import asyncio
from typing import Any

import pytest
from event_stream_helpers import Client, run, settle

from octavo.server.limits import ClientGoneError, Presence, presence_of, unless_gone


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError


def test_one_watcher_for_several_works() -> None:
    async def test() -> None:
        client, num_received = Client(), 0

        async def receive() -> Any:
            nonlocal num_received
            num_received += 1
            return await client.receive()

        scope: dict[str, Any] = {}
        presence = presence_of(scope, receive)
        assert presence_of(scope, receive) is presence
        assert [await presence.unless_gone(answer(value)) for value in (1, 2)] == [1, 2]
        assert num_received == 1
        with pytest.raises(ZeroDivisionError):
            await presence.unless_gone(fail())
        client.is_gone.set()
        with pytest.raises(ClientGoneError):
            await presence.unless_gone(forever())
        # Also what begins later.
        with pytest.raises(ClientGoneError):
            await presence.unless_gone(answer(3))
        presence.close()
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test)


def test_a_client_that_leaves_between_two_works() -> None:
    async def test() -> None:
        client = Client()
        presence = Presence(client.receive)
        await presence.unless_gone(answer(1))
        client.is_gone.set()
        await settle()
        with pytest.raises(ClientGoneError):
            await presence.unless_gone(answer(2))
        # Whoever answers is not cancelled: it may still say something.
        await settle()

    run(test)


def test_a_connection_that_fails_has_no_client() -> None:
    async def test() -> None:
        async def receive() -> Any:
            raise OSError("reset")

        with pytest.raises(ClientGoneError):
            await unless_gone(receive, forever())

    run(test)


@pytest.mark.parametrize("leaves", [True, False])
def test_who_cancels_the_answer_cancels_it(*, leaves: bool) -> None:
    async def test() -> None:
        client = Client()
        task = asyncio.ensure_future(unless_gone(client.receive, forever()))
        await settle()
        if leaves:
            client.is_gone.set()
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test)


def test_a_timeout_inside_and_outside() -> None:
    async def test() -> None:
        client = Client()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await unless_gone(client.receive, forever())

        async def impatient() -> str:
            try:
                async with asyncio.timeout(0.01):
                    await forever()
            except TimeoutError:
                return "late"
            return "never"

        assert await unless_gone(client.receive, impatient()) == "late"

    run(test)
