"""CPU time of EngineLoop and its streams per token, with an engine that only pretends to compute.

The stand-in engine writes one token and a piece of text to every running output per step, as the real one
does, and nothing else. Its own time is measured without the loop and taken off. Prints microseconds of CPU
per streamed token, deltas per second and core, wake-ups of the event loop per step; of several runs the one
that took least, since neighbours on the machine only add. "one thread" is the same way from output to reader
without the engine's thread, the median of all steps: what Python alone costs. The last line is JSON.

    python benchmarks/server_loop.py [--streams 256] [--tokens 400] [--step-ms 2] [--runs 5] [--save MACHINE]
"""

import asyncio
import statistics
import time
from typing import Any, cast

from support.common import figures_table, make_parser, publish
from support.fake_engine import FakeEngine, cpu_s_alone, plain_params, short_prompt

from octavo.engine.engine import Engine
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.loop.jobs import Job
from octavo.server.loop.output_stream import Readers, Stream
from octavo.server.loop.stats import Histogram


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    num_streams, num_tokens, step_s = arguments.streams, arguments.tokens, arguments.step_ms / 1000
    runs = range(arguments.runs)
    alone_s = min(cpu_s_alone(num_streams, num_tokens, step_s) for _ in runs)
    all_runs = [asyncio.run(streamed(num_streams, num_tokens, step_s)) for _ in runs]
    with_loop = min(all_runs, key=lambda run: run["cpu_s"])
    own_s = with_loop["cpu_s"] - alone_s
    total = num_streams * num_tokens
    figures: dict[str, object] = {
        "streams": num_streams,
        "tokens_per_stream": num_tokens,
        "step_ms": arguments.step_ms,
        "us_per_token_each_run": [(run["cpu_s"] - alone_s) / total * 1e6 for run in all_runs],
        "us_per_token_one_thread": asyncio.run(one_thread(num_streams, num_tokens)) * 1e6,
        "us_per_token": own_s / total * 1e6,
        "us_per_token_engine_alone": alone_s / total * 1e6,
        "tokens_per_s_and_core": total / own_s,
        "deltas": with_loop["deltas"],
        "tokens_per_delta": total / with_loop["deltas"],
        "wakeups_per_step": with_loop["wakeups"] / with_loop["steps"],
        "us_per_delta": own_s / with_loop["deltas"] * 1e6,
    }
    print(figures_table(figures))
    publish("server_loop", figures, arguments)


async def streamed(num_streams: int, num_tokens: int, step_s: float) -> dict[str, float]:
    """CPU seconds, deltas, wake-ups and steps of so many streams that are read side by side."""
    engine = FakeEngine(step_s)
    loop = EngineLoop(lambda: cast(Engine, engine))
    loop.start()
    await loop.wait_until_ready()
    event_loop, num_wakeups = asyncio.get_running_loop(), 0
    call_soon_threadsafe = event_loop.call_soon_threadsafe

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_wakeups
        num_wakeups += 1
        return call_soon_threadsafe(*arguments, **options)

    event_loop.call_soon_threadsafe = counted  # type: ignore[method-assign]

    async def client(number: int) -> int:
        stream = await loop.submit(short_prompt(), plain_params(num_tokens), request_id=str(number))
        num_deltas = num_read = 0
        async for deltas in stream:
            num_deltas += len(deltas)
            num_read += sum(len(delta.token_ids) for delta in deltas)
        assert num_read == num_tokens
        return num_deltas

    start = time.process_time()
    counts = await asyncio.gather(*map(client, range(num_streams)))
    cpu_s = time.process_time() - start
    loop.stop()
    return {"cpu_s": cpu_s, "deltas": sum(counts), "wakeups": num_wakeups, "steps": engine.num_steps}


async def one_thread(num_streams: int, num_tokens: int) -> float:
    """Median seconds per token from ring to reader, with steps on the event loop's own thread."""
    engine = FakeEngine(0)
    readers = Readers(asyncio.get_running_loop(), Histogram(), Histogram())

    async def client(number: int) -> None:
        job = Job(str(number), None, short_prompt(), plain_params(num_tokens), "", 0, True, time.monotonic())
        job.output = engine.add_request(job.token_ids, job.params, request_id=job.request_id)
        async for _ in Stream(job, readers, lambda _: None):
            pass

    clients = [asyncio.ensure_future(client(number)) for number in range(num_streams)]
    await asyncio.sleep(0)
    times: list[float] = []
    while engine.has_unfinished_requests:
        engine.step()
        start = time.perf_counter()
        readers.ring()
        # The wake-up, then the tasks.
        for _ in range(2):
            await asyncio.sleep(0)
        times.append(time.perf_counter() - start)
    await asyncio.gather(*clients)
    return statistics.median(times) / num_streams


if __name__ == "__main__":
    main()
