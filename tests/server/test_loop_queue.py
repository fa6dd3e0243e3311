"""What may wait, in which order, what is refused, and how a drain ends it."""

import asyncio
from collections.abc import Callable

import pytest
from loop_helpers import assert_drained, collect, hurry, pace, until

from octavo import SamplingParams
from octavo.errors import (
    InvalidArgumentError,
    NotReadyError,
    PromptError,
    QueueFullError,
    RequestTooLongError,
    SamplingParamsError,
)
from octavo.server.loop.engine_loop import EngineLoop

StartLoop = Callable[..., EngineLoop]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


def test_the_queue_is_bounded_by_requests_and_by_tokens(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop({"max_waiting": 4, "max_waiting_tokens": 100}, max_num_seqs=1)
        await loop.wait_until_ready()
        await loop.call(pace)
        busy = await loop.submit([9], LONG, request_id="busy")
        await until(lambda: loop.stats().num_waiting == 0)
        waiting = [await loop.submit([5] * 20, PARAMS, request_id=str(n)) for n in range(3)]
        with pytest.raises(QueueFullError, match="60 prompt tokens wait, at most 100") as refused:
            await loop.submit([5] * 41, PARAMS, request_id="long")
        assert 1 <= refused.value.retry_after_s <= 60
        with pytest.raises(QueueFullError, match="3 completions wait, at most 4"):
            await loop.submit([5], SamplingParams(n=2), request_id="two")
        waiting.append(await loop.submit([5], PARAMS, request_id="last"))
        with pytest.raises(QueueFullError):
            await loop.submit([5], PARAMS, request_id="more")
        assert loop.stats().num_rejected == 3
        await loop.call(hurry)
        await busy.aclose()
        await asyncio.gather(*(stream.result() for stream in waiting))
        # An empty queue takes what is larger than all of it.
        large = await loop.submit([5] * 150, SamplingParams(n=5, max_tokens=2), request_id="large")
        await large.result()
        await assert_drained(loop)

    asyncio.run(run())


def test_lower_priorities_are_admitted_first(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop(max_num_seqs=1)
        await loop.wait_until_ready()
        await loop.call(pace)
        busy = await loop.submit([9], LONG, request_id="busy")
        await until(lambda: loop.stats().num_waiting == 0)
        # Who wakes first says nothing where a client takes longer to wake than a request to run.
        admitted: dict[str, float] = {}

        async def client(name: str, priority: int) -> None:
            stream = await loop.submit([5, 6], PARAMS, request_id=name, priority=priority)
            scheduled = (await stream.result()).metrics.first_scheduled_s
            assert scheduled is not None
            admitted[name] = scheduled

        named = [("a", 1), ("b", 0), ("c", -1), ("d", 0), ("e", -1)]
        clients = [asyncio.ensure_future(client(*pair)) for pair in named]
        await until(lambda: loop.stats().num_waiting == 5)
        await loop.call(hurry)
        await busy.aclose()
        await asyncio.gather(*clients)
        order = sorted(admitted, key=lambda name: admitted[name])
        assert order == ["c", "e", "b", "d", "a"]

    asyncio.run(run())


def test_what_can_never_run_is_refused_before_it_waits(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        with pytest.raises(NotReadyError, match="loading"):
            await loop.submit([5], PARAMS, request_id="early")
        with pytest.raises(NotReadyError, match="loading"):
            loop.engine  # noqa: B018
        await loop.wait_until_ready()
        await loop.call(pace)
        running = await loop.submit([5], LONG, request_id="a")
        for prompt, params, options, error in [
            ([], PARAMS, {}, PromptError),
            ("no tokenizer", PARAMS, {}, PromptError),
            ([101], PARAMS, {}, PromptError),
            ([5] * 300, PARAMS, {}, RequestTooLongError),
            ([5], {}, {}, SamplingParamsError),
            ([5], SamplingParams(stop=["x"]), {}, SamplingParamsError),
            ([5], PARAMS, {"request_id": "a"}, InvalidArgumentError),
            ([5], PARAMS, {"request_id": ""}, InvalidArgumentError),
            ([5], PARAMS, {"cache_salt": 3}, InvalidArgumentError),
            ([5], PARAMS, {"priority": True}, InvalidArgumentError),
        ]:
            with pytest.raises(error):
                await loop.submit(prompt, params, **{"request_id": "b", **options})  # type: ignore[arg-type]
        await loop.call(hurry)
        await running.result()
        await assert_drained(loop)

    asyncio.run(run())


@pytest.mark.parametrize("limit", ["max_waiting", "max_waiting_tokens", "step_deadline_s"])
def test_limits_must_be_above_zero(limit: str) -> None:
    with pytest.raises(InvalidArgumentError, match=limit):
        EngineLoop(lambda: None, **{limit: 0})  # type: ignore[arg-type, return-value]


def test_a_drain_lets_requests_finish_and_aborts_the_rest_at_its_timeout(start_loop: StartLoop) -> None:
    async def run(timeout_s: float) -> str | None:
        loop = start_loop(max_num_seqs=2)
        await loop.wait_until_ready()
        if timeout_s == 0:
            await loop.call(pace)
        streams = [await loop.submit([5, n], LONG, request_id=str(n)) for n in range(6)]
        draining = asyncio.ensure_future(loop.drain(timeout_s))
        await asyncio.sleep(0)
        assert loop.state == "draining"
        with pytest.raises(NotReadyError, match="about to end"):
            await loop.submit([5], PARAMS, request_id="late")
        await draining
        assert loop.stats().num_live == 0
        last = (await collect(streams[-1]))[-1]
        await assert_drained(loop)
        return last.finish_reason

    assert asyncio.run(run(60)) == "length"
    assert asyncio.run(run(0)) == "abort"
