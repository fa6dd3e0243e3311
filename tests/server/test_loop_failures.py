"""The loop when its engine fails: requests, steps, the whole engine, and steps that hang."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from loop_helpers import assert_drained, collect, until

from octavo import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.model_runner import ModelRunner
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.scheduler import Scheduler
from octavo.errors import EngineDeadError, EngineError, ModelNotFoundError
from octavo.server.loop.engine_loop import EngineLoop

StartLoop = Callable[..., EngineLoop]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


async def tokens_of(loop: EngineLoop, name: str) -> list[int]:
    stream = await loop.submit([5, 6], PARAMS, request_id=name)
    return (await stream.result()).outputs[0].token_ids


def test_an_engine_that_cannot_be_loaded_is_dead_and_says_why() -> None:
    def make() -> Engine:
        raise ModelNotFoundError("no such model")

    async def run() -> None:
        loop = EngineLoop(make)
        loop.start()
        with pytest.raises(EngineDeadError, match="no such model"):
            await loop.wait_until_ready()
        assert loop.state == "dead"
        assert isinstance(loop.error, ModelNotFoundError)
        for act in (lambda: loop.submit([5], PARAMS, request_id="a"), lambda: loop.call(lambda _: None)):
            with pytest.raises(EngineDeadError, match="no such model"):
                await act()
        loop.stop()

    asyncio.run(run())


def test_a_step_that_fails_ends_its_requests_and_no_others(
    start_loop: StartLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        expected = await tokens_of(loop, "before")

        def broken(*_: object) -> None:
            raise RuntimeError("kernel failed")

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "_forward", broken)
            stream = await loop.submit([5], PARAMS, request_id="a")
            deltas = await anext(stream)
            assert deltas[-1].finish_reason == "error"
            for _ in range(2):
                with pytest.raises(EngineError, match="kernel failed"):
                    await anext(stream)
        assert loop.state == "ready"
        assert await tokens_of(loop, "after") == expected
        await assert_drained(loop)

    asyncio.run(run())


def test_a_request_that_cannot_be_added_fails_alone(
    start_loop: StartLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        expected = await tokens_of(loop, "before")
        add = OutputProcessor.add

        def broken(self: OutputProcessor, requests: list, *arguments: object) -> object:
            output = add(self, requests, *arguments)  # type: ignore[arg-type]
            if requests[0].request_id == "bad":
                raise RuntimeError("half added")
            return output

        monkeypatch.setattr(OutputProcessor, "add", broken)
        neighbour = await loop.submit([9], LONG, request_id="neighbour")
        bad = await loop.submit([5], LONG, request_id="bad")
        with pytest.raises(EngineError, match="half added"):
            await collect(bad)
        assert not await loop.call(lambda engine: "bad" in engine.outputs)
        assert len((await neighbour.result()).outputs[0].token_ids) == 150
        assert await tokens_of(loop, "after") == expected
        await assert_drained(loop)

    asyncio.run(run())


def test_a_step_that_raises_once_is_tried_again(
    start_loop: StartLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        expected = await tokens_of(loop, "before")
        schedule, failures = Scheduler.schedule, [MemoryError("once"), MemoryError("twice")]

        def broken(self: Scheduler, *arguments: object) -> object:
            output = schedule(self, *arguments)  # type: ignore[arg-type]
            if failures:
                raise failures.pop()
            return output

        monkeypatch.setattr(Scheduler, "schedule", broken)
        assert await tokens_of(loop, "during") == expected
        assert not failures
        await assert_drained(loop)

    asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError("device gone"), SystemExit("device gone")], ids=repr)
def test_when_the_engine_dies_every_stream_raises_within_two_seconds(
    start_loop: StartLoop, error: BaseException
) -> None:
    async def run() -> None:
        loop = start_loop(max_num_seqs=4)
        await loop.wait_until_ready()
        streams = [await loop.submit([5, n], LONG, request_id=str(n)) for n in range(20)]
        readers = [asyncio.ensure_future(collect(stream)) for stream in streams[1:]]
        slow = streams[0]
        await anext(slow)

        def broken() -> None:
            raise error

        await loop.call(lambda engine: setattr(engine, "step", broken))
        start = time.monotonic()
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert time.monotonic() - start < 5
        assert {type(result) for result in results} == {EngineDeadError}
        assert len({id(result) for result in results}) == len(results)
        with pytest.raises(EngineDeadError, match="device gone"):
            await collect(slow)
        assert loop.state == "dead"
        assert loop.error is error
        with pytest.raises(EngineDeadError, match="device gone"):
            await loop.submit([5], PARAMS, request_id="late")
        await loop.drain(10)
        stats = loop.stats()
        assert (stats.num_live, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)

    asyncio.run(run())


def test_a_step_past_its_deadline_ends_all_streams_and_the_engine_lives_if_it_comes_back(
    start_loop: StartLoop, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        loop = start_loop({"step_deadline_s": 1.0}, max_num_seqs=2)
        await loop.wait_until_ready()
        expected = await tokens_of(loop, "before")
        released = threading.Event()

        def hang(engine: Engine) -> None:
            step = engine.step

            def hangs_here_in_a_step() -> None:
                engine.step = step  # type: ignore[method-assign]
                step()
                released.wait()

            engine.step = hangs_here_in_a_step  # type: ignore[method-assign]

        streams = [await loop.submit([5, n], LONG, request_id=str(n)) for n in range(8)]
        await loop.call(hang)
        start = time.monotonic()
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert time.monotonic() - start < 20
        assert {type(result) for result in results} == {EngineDeadError}
        assert loop.state == "dead"
        assert loop.seconds_since_progress > 0.9
        with pytest.raises(EngineDeadError, match="has run for"):
            await loop.submit([5], PARAMS, request_id="late")
        assert "hangs_here_in_a_step" in capfd.readouterr().err
        released.set()
        await until(lambda: loop.state == "ready")
        # The ids are free again, and what the streams had is gone.
        assert await tokens_of(loop, "0") == expected
        with pytest.raises(EngineDeadError):
            await anext(streams[0])
        await assert_drained(loop)

    asyncio.run(run())


def test_a_step_that_comes_back_while_it_is_given_up_changes_nothing(
    start_loop: StartLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap: requests were refused for ever if the loop went on before they had been failed."""

    async def run() -> None:
        loop = start_loop({"step_deadline_s": 60.0})
        await loop.wait_until_ready()
        worker = loop._worker
        fail_all = worker._jobs.fail_all

        def slow(reason: str) -> None:
            # A loop that sees an error by now goes on, and has reopened before they are failed.
            time.sleep(0.2)
            fail_all(reason)

        monkeypatch.setattr(worker._jobs, "fail_all", slow)
        await asyncio.to_thread(worker._overrun, 1.0)
        await until(lambda: loop.state == "ready")
        assert await tokens_of(loop, "after")

    asyncio.run(run())


def test_a_stopped_loop_ends_its_streams(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        reader = asyncio.ensure_future(collect(await loop.submit([5], LONG, request_id="a")))
        await asyncio.sleep(0)
        loop.stop()
        loop.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            await reader
        assert not loop._worker._thread.is_alive()

    asyncio.run(run())


def test_a_loop_that_was_never_started_can_be_stopped() -> None:
    EngineLoop(lambda: None).stop()  # type: ignore[arg-type, return-value]


def test_blocks_that_nobody_holds_are_noticed_and_told_once(
    start_loop: StartLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(loop: EngineLoop, name: str) -> None:
        await collect(await loop.submit([3, 4, 5], PARAMS, request_id=name))
        await until(lambda: loop.stats().num_live == 0)

    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        await ask(loop, "sound")
        assert loop.stats().num_leaked_blocks == 0
        lost = loop.engine.manager.new_sequence()
        assert await loop.call(lambda engine: engine.manager.allocate(lost, 1))
        for name in ("first", "second"):
            await ask(loop, name)
            await until(lambda: loop.stats().num_leaked_blocks == 1)
        await loop.call(lambda engine: engine.manager.free(lost))
        await ask(loop, "third")
        await until(lambda: loop.stats().num_leaked_blocks == 0)

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if "are held" in record.getMessage()] == [
        "blocks of the KV cache are held although no request is left: 1"
    ]
