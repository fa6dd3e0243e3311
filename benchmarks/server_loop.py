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
from array import array
from types import SimpleNamespace
from typing import Any, cast

from support.common import figures_table, make_parser, publish

from octavo import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.prompts import PromptReader, TokenIds
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.loop.jobs import Job
from octavo.server.loop.stats import Histogram
from octavo.server.loop.stream import Readers, Stream

VOCAB_SIZE = 1000


class FakeEngine:
    """As much of an Engine as the loop uses.

    Args:
        step_s: how long a step leaves the processor to others; 0: not at all.
    """

    spare_s = 0.0

    def __init__(self, step_s: float) -> None:
        self.prompts = PromptReader(None, vocab_size=VOCAB_SIZE, max_model_len=1 << 20, num_kv_tokens=1 << 20)
        self._step_s = step_s
        self._running: dict[str, tuple[RequestOutput, int]] = {}
        self.num_steps = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._running)

    def add_request(
        self, prompt: TokenIds, params: SamplingParams, *, request_id: str, **_: object
    ) -> RequestOutput:
        """Start an output."""
        now = time.monotonic()
        metrics = RequestMetrics(arrival_s=now, first_scheduled_s=now, num_prompt_tokens=len(prompt.listed))
        output = RequestOutput(request_id, None, prompt.listed, [CompletionOutput(0)], metrics=metrics)
        self._running[request_id] = output, params.max_tokens or 1
        return output

    def step(self) -> None:
        """Write a token to every output, in the order of output_processor.py."""
        if self._step_s:
            time.sleep(self._step_s)
        self.num_steps += 1
        for request_id, (output, max_tokens) in list(self._running.items()):
            completion = output.outputs[0]
            if output.metrics.first_token_s is None:
                output.metrics.first_token_s = time.monotonic()
            output.metrics.num_output_tokens += 1
            completion.token_ids.append(7)
            completion.text += " word"
            if len(completion.token_ids) == max_tokens:
                completion.finish_reason = "length"
                output.metrics.finished_s = time.monotonic()
                output.finished = True
                del self._running[request_id]

    def abort(self, request_id: str) -> None:
        """Forget a request."""
        self._running.pop(request_id, None)

    def stats(self) -> Any:
        """No counters."""
        return SimpleNamespace()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    num_streams, num_tokens, step_s = arguments.streams, arguments.tokens, arguments.step_ms / 1000
    runs = range(arguments.runs)
    alone_s = min(engine_alone(num_streams, num_tokens, step_s) for _ in runs)
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


def engine_alone(num_streams: int, num_tokens: int, step_s: float) -> float:
    """Seconds of CPU that the stand-in engine takes."""
    engine = FakeEngine(step_s)
    for number in range(num_streams):
        engine.add_request(_prompt(), _params(num_tokens), request_id=str(number))
    start = time.process_time()
    while engine.has_unfinished_requests:
        engine.step()
    return time.process_time() - start


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
        stream = await loop.submit(_prompt(), _params(num_tokens), request_id=str(number))
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
        job = Job(str(number), None, _prompt(), _params(num_tokens), "", 0, True, time.monotonic())
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


def _prompt() -> TokenIds:
    return TokenIds([5], array("i", [5]))


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


if __name__ == "__main__":
    main()
