"""When the loop plans: late enough for those who come while the engine can spare the time."""

import asyncio
from collections.abc import Callable

import pytest
from loop_helpers import assert_drained, until

from octavo import SamplingParams
from octavo.engine.engine import Engine
from octavo.server.loop.engine_loop import EngineLoop


def test_requests_that_come_in_spare_time_join_the_next_step(
    start_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    spare, asked = 0.0, 0

    def spare_s(self: Engine) -> float:
        nonlocal asked
        asked += 1
        return spare

    async def run() -> None:
        nonlocal spare
        loop = start_loop()
        await loop.wait_until_ready()
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        await loop.call(lambda _: monkeypatch.setattr(Engine, "spare_s", property(spare_s)))
        streams = [await loop.submit([5], params, request_id="first")]

        def begin(engine: Engine) -> int:
            nonlocal spare
            spare = 100.0
            return engine._steps.num_steps

        num_steps = await loop.call(begin)
        await asyncio.sleep(0.1)
        for name in "ab":
            streams.append(await loop.submit([5], params, request_id=name))
            job = streams[-1]._job
            await until(lambda job=job: job.output is not None)  # type: ignore[misc]
            assert loop.engine._steps.num_steps == num_steps + 1
        # It waits; it does not ask again and again.
        assert asked < 20
        first_tokens = [stream.output.outputs[0].token_ids for stream in streams[1:]]
        assert first_tokens == [[], []]
        spare = 0.0
        # Whatever the loop is told wakes it.
        await loop.call(lambda _: None)
        await until(lambda: all(stream.output.outputs[0].token_ids for stream in streams[1:]))
        for stream in streams:
            await stream.aclose()
        await assert_drained(loop)

    asyncio.run(run())
