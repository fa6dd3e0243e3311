"""Events on their way to a client: in order, held while it does not read, never lost or doubled."""

import asyncio
from typing import Any

import pytest
from event_stream_helpers import Client, Prompts, answering, run, settle

from octavo.errors import EngineDeadError
from octavo.server.api.sse import begun
from octavo.server.limits import ClientGoneError


def test_events_of_several_prompts_end_with_the_last_one() -> None:
    async def test() -> None:
        prompts, client = Prompts(2), Client()
        async with answering(prompts, client):
            prompts.write(1, "a")
            await settle()
            prompts.write(0, "b", ends=True)
            prompts.write(1, "c")
            await settle()
            prompts.write(1, "d", ends=True)
        assert b"".join(client.bodies) == b"begin 1:a 0:b 1:c 1:d finish last"
        assert client.bodies[-2:] == [b"1:c ", b"1:d finish last"]

    run(test)


def test_what_comes_while_a_client_does_not_read_is_one_event_later() -> None:
    async def test() -> None:
        prompts, client = Prompts(2), Client()
        async with answering(prompts, client):
            client.open.clear()
            for letter in "abcdef":
                prompts.write(0, letter)
                prompts.write(1, letter.upper())
                await settle()
            # Each prompt holds one piece; the rest is cut when it is wanted.
            held = [stream._deltas for stream in prompts.generation.streams]
            assert sum(len(deltas) for deltas in held) <= 2
            client.open.set()
            await settle()
            prompts.write(0, "!", ends=True)
            prompts.write(1, "!", ends=True)
        texts = b"".join(client.bodies).decode().removeprefix("begin ").removesuffix("finish last").split()
        assert "".join(text[2:] for text in texts if text[0] == "0") == "abcdef!"
        assert "".join(text[2:] for text in texts if text[0] == "1") == "ABCDEF!"
        assert len(texts) <= 8

    run(test)


@pytest.mark.parametrize("waits", [False, True])
def test_a_client_may_leave_once_it_has_everything(*, waits: bool) -> None:
    """Trap: a client that was faster than the last turn of the event loop was counted as one that left."""

    class Leaver(Client):
        async def send(self, message: Any) -> None:
            if waits:
                await asyncio.sleep(0)
            await super().send(message)
            if not message.get("more_body", True):
                self.is_gone.set()

    async def test() -> None:
        prompts, client = Prompts(1), Leaver()
        async with answering(prompts, client) as answer:
            prompts.write(0, "a", ends=True)
            await settle()
        assert b"".join(client.bodies) == b"begin 0:a finish last"
        # It would raise that the client has gone.
        answer.result()

    run(test)


@pytest.mark.parametrize("error", ["in the writer", "of the engine"])
def test_an_error_is_the_last_event(error: str) -> None:
    async def test() -> None:
        prompts, client = Prompts(2), Client()
        async with answering(prompts, client):
            prompts.write(0, "a")
            await settle()
            if error == "in the writer":
                prompts.write(0, "bad")
            else:
                prompts.jobs[0].failure = EngineDeadError("the engine is dead")
                prompts.readers.ring()
            await settle()
            prompts.write(1, "unseen")
        assert client.bodies[:2] == [b"begin ", b"0:a "]
        assert b'"error":' in client.bodies[2]
        assert client.bodies[2].endswith(b"\n\nlast")
        assert client.bodies[3:] == []
        assert prompts.aborted

    run(test)


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_leaves_ends_the_generation(*, reads: bool) -> None:
    async def test() -> None:
        prompts, client = Prompts(1), Client()
        async with answering(prompts, client) as answer:
            if not reads:
                client.open.clear()
            prompts.write(0, "a")
            await settle()
            client.is_gone.set()
            with pytest.raises(ClientGoneError):
                await answer
            assert prompts.aborted == prompts.jobs
            # The engine ends it; nobody is told any more.
            prompts.write(0, "b", ends=True)
        assert b"".join(client.bodies) == (b"begin 0:a " if reads else b"begin ")

    run(test)


def test_a_client_that_stops_reading_is_given_up() -> None:
    async def test() -> None:
        prompts, client = Prompts(1), Client()
        async with answering(prompts, client, write_timeout_s=0.1) as answer:
            client.open.clear()
            prompts.write(0, "a")
            with pytest.raises(ClientGoneError):
                await answer
        assert prompts.aborted == prompts.jobs

    run(test)


def test_the_last_event_has_to_be_read_too() -> None:
    async def test() -> None:
        prompts, client = Prompts(1), Client()
        async with answering(prompts, client, write_timeout_s=0.1) as answer:
            client.open.clear()
            prompts.write(0, "a", ends=True)
            with pytest.raises(ClientGoneError):
                await answer

    run(test)


def test_a_connection_that_fails_ends_the_answer() -> None:
    async def test() -> None:
        prompts, client = Prompts(1), Client()
        async with answering(prompts, client) as answer:
            client.open.clear()
            prompts.write(0, "a")
            await settle()
            client.fails = True
            client.open.set()
            with pytest.raises(OSError, match="reset"):
                await answer
        assert prompts.aborted == prompts.jobs

    run(test)


def test_comments_come_while_nothing_else_does() -> None:
    async def test() -> None:
        prompts, client = Prompts(1), Client()
        async with answering(prompts, client, keep_alive_s=0.02):
            await asyncio.sleep(0.1)
            assert client.bodies.count(b"idle ") >= 2
            client.open.clear()
            prompts.write(0, "a")
            await asyncio.sleep(0.1)
            num_idle = client.bodies.count(b"idle ")
            client.open.set()
            prompts.write(0, "b", ends=True)
        words = [body for body in client.bodies if body != b"idle "]
        assert b"".join(words) in (b"begin 0:ab finish last", b"begin 0:a 0:b finish last")
        # At most the one that was on its way.
        assert client.bodies.count(b"idle ") <= num_idle + 1

    run(test)


def test_everybody_gets_a_turn_while_the_engine_is_faster() -> None:
    async def test() -> None:
        prompts, turns = Prompts(3), list[str]()

        def notify(number: int) -> bool:
            stream = prompts.generation.streams[number]
            turns.append(f"{number}{stream.take()[0].text}")
            # A step ends while this stream is read.
            if len(turns) < 7:
                prompts.write(number, str(len(turns)))
            return True

        for number, stream in enumerate(prompts.generation.streams):
            stream.when_news(lambda number=number: notify(number))  # type: ignore[misc]
            prompts.write(number, "a")
        await settle()
        assert turns == ["0a", "1a", "2a", "01", "12", "23", "04", "15", "26"]
        assert not any(deltas for stream in prompts.generation.streams for deltas in stream._deltas)

    run(test)


def test_begun_work_needs_a_task_only_to_wait() -> None:
    async def test() -> None:
        gate, steps = asyncio.Event(), list[str]()

        async def work() -> None:
            steps.append("begun")
            try:
                await gate.wait()
                await asyncio.sleep(0)
                steps.append("done")
            finally:
                steps.append("over")

        task, cancelled = begun(work()), begun(work())
        assert task is not None
        assert cancelled is not None
        assert steps == ["begun", "begun"]
        await settle()
        cancelled.cancel()
        await settle()
        gate.set()
        await task
        assert begun(work()) is not None
        await settle()
        assert steps == ["begun", "begun", "over", "done", "over", "begun", "done", "over"]

        async def quick() -> None:
            steps.append("quick")

        assert begun(quick()) is None

    run(test)
