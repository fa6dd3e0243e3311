"""When the loop plans: late enough for those who come while the engine can spare the time."""

import asyncio
import time
from collections.abc import Callable

import pytest
from loop_helpers import assert_drained, until

from octavo import SamplingParams
from octavo.engine.engine import Engine
from octavo.server.loop.engine_loop import EngineLoop


def test_requests_that_come_in_spare_time_join_the_next_step(
    start_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    spare_until, asked = 0.0, 0

    def spare_s(self: Engine) -> float:
        nonlocal asked
        asked += 1
        return max(0.0, spare_until - time.monotonic())

    async def run() -> None:
        nonlocal spare_until
        loop = start_loop()
        await loop.wait_until_ready()
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        await loop.call(lambda _: monkeypatch.setattr(Engine, "spare_s", property(spare_s)))
        streams = [await loop.submit([5], params, request_id="first")]

        def begin(engine: Engine) -> int:
            nonlocal spare_until
            spare_until = time.monotonic() + 1.0
            return engine._steps.num_steps

        num_steps = await loop.call(begin)
        await asyncio.sleep(0.1)
        for name in "ab":
            streams.append(await loop.submit([5], params, request_id=name))
            job = streams[-1]._job
            await until(lambda job=job: job.output is not None, 0.3)  # type: ignore[misc]
            assert loop.engine._steps.num_steps == num_steps + 1
        assert time.monotonic() < spare_until
        # It waits; it does not ask again and again.
        assert asked < 20
        first_tokens = [stream.output.outputs[0].token_ids for stream in streams[1:]]
        assert first_tokens == [[], []]
        await until(lambda: all(stream.output.outputs[0].token_ids for stream in streams[1:]), 3)
        assert time.monotonic() >= spare_until
        for stream in streams:
            await stream.aclose()
        await assert_drained(loop)

    asyncio.run(run())
