"""The loop: what is streamed, refused, aborted and drained."""

import asyncio
import random
from collections.abc import Callable

import pytest
from loop_helpers import assert_drained, collect

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.server.loop import EngineLoop

StartLoop = Callable[..., EngineLoop]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


def test_streams_yield_what_generate_returns(
    start_loop: StartLoop, tiny_engine: Callable[..., Engine]
) -> None:
    prompts = [[3 + number, 5, 7] for number in range(12)]
    params = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=20, logprobs=1)
    expected = LLM.from_engine(tiny_engine()).generate(prompts, params)  # type: ignore[arg-type]

    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        streams = [
            await loop.submit(prompt, params, request_id=str(number)) for number, prompt in enumerate(prompts)
        ]
        for deltas, output in zip(await asyncio.gather(*map(collect, streams)), expected, strict=True):
            assert deltas[-1].output is not None
            assert all(delta.output is None for delta in deltas[:-1])
            for index, completion in enumerate(output.outputs):
                mine = [delta for delta in deltas if delta.index == index]
                assert [token for delta in mine for token in delta.token_ids] == completion.token_ids
                assert [entry for delta in mine for entry in delta.logprobs or ()] == completion.logprobs
                assert [delta.finish_reason for delta in mine if delta.finish_reason] == [
                    completion.finish_reason
                ]
        await assert_drained(loop)

    asyncio.run(run())


def test_200_streams_with_random_aborts_all_end_and_the_pool_is_full_again(start_loop: StartLoop) -> None:
    rng = random.Random(0)

    async def client(loop: EngineLoop, number: int) -> str:
        await asyncio.sleep(rng.random() * 0.3)
        prompt = [rng.randrange(3, 100) for _ in range(rng.randrange(1, 40))]
        params = SamplingParams(max_tokens=rng.randrange(1, 30), n=rng.choice([1, 1, 3]), ignore_eos=True)
        stream = await loop.submit(prompt, params, request_id=str(number), priority=rng.randrange(3))
        way, num_read = rng.choice(["read", "abort", "close", "drop", "cancel", "result"]), rng.randrange(4)
        if way == "result":
            return (await stream.result()).outputs[0].finish_reason or ""
        if way == "cancel":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(collect(stream), asyncio.sleep(60)), 0.05)
            return way
        reason = ""
        async for deltas in stream:
            num_read -= 1
            if way == "drop" and num_read < 0:
                return way
            if way == "close" and num_read < 0:
                await stream.aclose()
            if way == "abort" and num_read < 0:
                stream.abort()
                stream.abort()
            reason = deltas[-1].finish_reason or reason
        return reason or way

    async def run() -> None:
        loop = start_loop(max_num_seqs=32)
        await loop.wait_until_ready()
        reasons = await asyncio.wait_for(asyncio.gather(*(client(loop, n) for n in range(200))), 120)
        assert {"length", "abort", "drop", "close", "cancel"} >= set(reasons) > {"length", "abort"}
        await assert_drained(loop)
        assert sum(loop.stats().num_finished.values()) == 200

    asyncio.run(run())
