"""The loop: what is streamed, aborted and counted."""

import asyncio
import random
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from loop_helpers import assert_drained, collect, hurry, pace, texts_of, until

from octavo import LLM, EngineConfig, SamplingParams
from octavo.engine.engine import Engine
from octavo.server.loop.engine_loop import EngineLoop

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


def test_cancelling_a_read_loses_nothing(start_loop: StartLoop) -> None:
    """A keep-alive's timeout cancels `__anext__` at every moment, also when news has just been cut."""

    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        stream, whole = [await loop.submit([5, 6], LONG, request_id=name) for name in "ab"]
        tokens: list[int] = []
        rng, num_cancelled = random.Random(1), 0
        while True:
            try:
                deltas = await asyncio.wait_for(anext(stream), rng.random() * 2e-3)
            except TimeoutError:
                num_cancelled += 1
                continue
            except StopAsyncIteration:
                break
            tokens += [token for delta in deltas for token in delta.token_ids]
        assert num_cancelled > 0
        assert tokens == (await whole.result()).outputs[0].token_ids
        await assert_drained(loop)

    asyncio.run(run())


def test_a_slow_reader_gets_one_delta_and_costs_no_memory(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        stream = await loop.submit([5, 6], LONG, request_id="slow")
        await until(lambda: loop.stats().num_live == 0)
        assert stream._deltas == []
        (delta,) = await collect(stream)
        assert len(delta.token_ids) == 150
        assert delta.finish_reason == "length"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(run())


STATES = {
    # The requests that keep the engine busy, options, and the state in which the request is aborted.
    "queued": (LONG, {"max_num_seqs": 1}, lambda output: output.metrics.first_scheduled_s is None),
    "mid-prefill": (
        None,
        {"max_num_batched_tokens": 4},
        lambda output: output.metrics.first_scheduled_s is not None and not output.outputs[0].token_ids,
    ),
    "mid-decode": (None, {}, lambda output: len(output.outputs[0].token_ids) > 2),
    "n = 3": (None, {}, lambda output: len(output.outputs[2].token_ids) > 2),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", ["abort", "drop"])
def test_an_abort_frees_the_blocks_within_two_steps(start_loop: StartLoop, state: str, way: str) -> None:
    busy_params, options, is_reached = STATES[state]
    params = SamplingParams(n=3 if state == "n = 3" else 1, max_tokens=100, ignore_eos=True)

    async def run() -> None:
        loop = start_loop(**options)
        await loop.wait_until_ready()
        await loop.call(lambda engine: pace(engine, 0.02))
        busy = None if busy_params is None else await loop.submit([9] * 8, busy_params, request_id="busy")
        stream = await loop.submit([5] * 100, params, request_id="aborted")
        job = stream._job
        freed_after: list[int] = []

        def abort_when_reached(engine: Engine) -> bool:
            """In the engine's thread, between two steps; True once the state is reached."""
            nonlocal stream
            if job.output is None or not is_reached(job.output):
                return False
            hurry(engine)
            before, step = engine._steps.num_steps, engine.step

            def counted() -> None:
                step()
                if "aborted" not in engine.outputs and not freed_after:
                    freed_after.append(engine._steps.num_steps - before)

            engine.step = counted  # type: ignore[method-assign]
            stream.abort() if way == "abort" else stream.__del__()
            return True

        while not await loop.call(abort_when_reached):
            pass
        del stream
        await until(lambda: job.has_ended)
        if busy is not None:
            await until(lambda: bool(freed_after))
            assert freed_after[0] <= 2
            await busy.aclose()
        assert job.output is not None
        assert {c.finish_reason for c in job.output.outputs} == {"abort"}
        await assert_drained(loop)

    asyncio.run(run())


def test_stats_may_be_asked_from_any_thread_all_the_time(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        seen, errors, stopped = [], [], threading.Event()

        def ask() -> None:
            try:
                while not stopped.is_set():
                    seen.append(loop.stats())
                    assert loop.seconds_since_progress < 5
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        await loop.wait_until_ready()
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        streams = [await loop.submit([5, n], params, request_id=str(n)) for n in range(30)]
        await asyncio.gather(*map(collect, streams))
        await assert_drained(loop)
        stopped.set()
        thread.join()
        assert not errors
        stats = loop.stats()
        assert dict(stats.num_finished) == {"length": 30}
        assert (stats.num_prompt_tokens, stats.num_output_tokens) == (60, 600)
        assert stats.first_token_s.count == stats.e2e_s.count == stats.queue_s.count == 30
        assert stats.inter_token_s.count + stats.first_token_s.count <= 600
        assert stats.output_tokens.quantile(0.5) == 32
        assert stats.engine is not None
        assert stats.engine.num_output_tokens == 600
        assert all(a.num_output_tokens <= b.num_output_tokens for a, b in pairwise(seen))

    asyncio.run(run())


def test_readers_are_woken_once_a_step_at_most(start_loop: StartLoop) -> None:
    async def run() -> None:
        loop = start_loop()
        await loop.wait_until_ready()
        event_loop, num_wakeups = asyncio.get_running_loop(), 0
        call_soon_threadsafe = event_loop.call_soon_threadsafe

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal num_wakeups
            num_wakeups += 1
            return call_soon_threadsafe(*arguments, **options)

        event_loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        streams = [await loop.submit([5, n], LONG, request_id=str(n)) for n in range(16)]
        await asyncio.gather(*map(collect, streams))
        engine_stats = loop.stats().engine
        assert engine_stats is not None
        assert 1 <= num_wakeups <= engine_stats.num_steps

    asyncio.run(run())


def test_text_is_streamed_as_it_is_generated() -> None:
    """The real tokenizer: emoji and other scripts, whose characters take several tokens."""
    engine = Engine(EngineConfig.from_dict({"num_blocks": 256}))
    prompts = ["Emoji: 😀 🎉 👩‍👩‍👧 ", "日本語の文章を", "x" * 300, "Übung macht den"]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=24, n=2, stop=["\n\n"])
    expected = LLM.from_engine(engine).generate(prompts, params)  # type: ignore[arg-type]

    async def run() -> None:
        loop = EngineLoop(lambda: engine)
        loop.start()
        await loop.wait_until_ready()
        streams = [await loop.submit(prompt, params, request_id=prompt[:5]) for prompt in prompts]
        for stream, output in zip(streams, expected, strict=True):
            deltas = await collect(stream)
            assert texts_of(deltas, 2) == [completion.text for completion in output.outputs]
            assert stream.output.prompt == output.prompt
        await assert_drained(loop)
        loop.stop()

    asyncio.run(run())
