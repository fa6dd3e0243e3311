"""Sends requests when they are due, and watches that the client itself is not too slow."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.bench_client.client import Answer, Client, warm_up
from octavo.bench_client.options import LoadOptions
from octavo.bench_client.workload import Prompt, arrival_times, make_prompts
from octavo.garbage import freeze

_TICK_S = 0.02


@dataclass(slots=True)
class Load:
    """What a run did, as the client saw it.

    Attributes:
        answers: of all requests, in the order of their times.
        duration_s: from the start to the end of the last one.
        peak_concurrency: most requests that were under way at a time.
        lags_s: how late the client's event loop woke up, every 20 ms.
        cpu_share: of one core that the client took.
    """

    answers: list[Answer]
    duration_s: float = 0.0
    peak_concurrency: int = 0
    lags_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0


async def run_load(options: LoadOptions) -> Load:
    """Put the load on the server.

    Raises:
        ConfigError: no server answers, a file cannot be read, or a warm-up request fails.
        OctavoError: a process of the client ended early.
    """
    prompts = make_prompts(options, options.num_prompts, options.seed)
    warm = make_prompts(options, options.warmup, options.seed + 1)
    times = arrival_times(options)
    async with Client(options) as client:
        model = await client.find_model()
        await warm_up(client, warm)
        if options.processes == 1:
            return await send_load(client, options, prompts, times, time.perf_counter())
    # It imports this file, as its children do.
    from octavo.bench_client.processes import run_in_processes

    return await run_in_processes(replace(options, served_model_name=model), prompts, times)


async def send_load(
    client: Client, options: LoadOptions, prompts: Sequence[Prompt], times: Sequence[float], begin_s: float
) -> Load:
    """Send prompts, each at its time, in seconds after `begin_s` by time.perf_counter."""
    freeze()
    return await _Run(client, options.max_concurrency).run(prompts, times, begin_s)


class _Run:
    def __init__(self, client: Client, max_concurrency: int | None) -> None:
        self._client = client
        self._places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._num_under_way = 0
        self._load = Load([])

    async def run(self, prompts: Sequence[Prompt], times: Sequence[float], begun: float) -> Load:
        """Send everything; return when all have ended."""
        load = self._load
        watching = asyncio.ensure_future(self._watch())
        cpu_s = time.process_time()
        tasks = []
        try:
            for prompt, due_s in zip(prompts, times, strict=True):
                answer = Answer(due_s=begun + due_s)
                load.answers.append(answer)
                if (wait_s := answer.due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(asyncio.ensure_future(self._send(prompt, answer)))
            await asyncio.gather(*tasks)
        finally:
            watching.cancel()
            for task in tasks:
                task.cancel()
        load.duration_s = max(answer.end_s for answer in load.answers) - begun
        load.cpu_share = (time.process_time() - cpu_s) / load.duration_s
        return load

    async def _send(self, prompt: Prompt, answer: Answer) -> None:
        answer.woken_s = time.perf_counter()
        if self._places is None:
            return await self._send_now(prompt, answer)
        async with self._places:
            await self._send_now(prompt, answer)

    async def _send_now(self, prompt: Prompt, answer: Answer) -> None:
        self._num_under_way += 1
        self._load.peak_concurrency = max(self._load.peak_concurrency, self._num_under_way)
        try:
            await self._client.send(prompt, answer)
        finally:
            self._num_under_way -= 1

    async def _watch(self) -> None:
        while True:
            until = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._load.lags_s.append(max(0.0, time.perf_counter() - until))
