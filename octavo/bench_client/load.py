"""Sends requests when they are due, from one process or several, and watches that none of them is too slow.

Several processes read more streams in time than one process of Python can:

    this process    Share ─►         ─► start ─►             one Load
    its children              ready              requests ─► a Load each

Their times can be compared: all processes of a machine have one clock (time.perf_counter).
"""

import asyncio
import os
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import msgspec
from msgspec import Struct

from octavo.bench_client.client import Answer, Client, warm_up
from octavo.bench_client.options import LoadOptions
from octavo.bench_client.workload import Prompt, arrival_times, make_prompts
from octavo.errors import OctavoError
from octavo.garbage import freeze

_TICK_S = 0.02
# Seconds between the moment when all children are ready and the first request.
_START_S = 0.1


@dataclass(slots=True)
class Load:
    """The course of a run, as the client saw it.

    Attributes:
        answers: the answers to all requests, in the order of their times.
        duration_s: from the start to the end of the last one.
        peak_concurrency: most requests that were in flight at a time.
        lags_s: how late the client's event loop woke up, every 20 ms.
        cpu_share: share of one core that the client took.
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
        self._num_in_flight = 0
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
        self._num_in_flight += 1
        self._load.peak_concurrency = max(self._load.peak_concurrency, self._num_in_flight)
        try:
            await self._client.send(prompt, answer)
        finally:
            self._num_in_flight -= 1

    async def _watch(self) -> None:
        while True:
            until = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._load.lags_s.append(max(0.0, time.perf_counter() - until))


class Share(Struct):
    """The part of the load that one process sends."""

    options: LoadOptions
    prompts: list[Prompt]
    times: list[float]

    async def send(self, begin_s: float) -> Load:
        """Put it on the server."""
        async with Client(self.options) as client:
            return await send_load(client, self.options, self.prompts, self.times, begin_s)


async def run_in_processes(options: LoadOptions, prompts: list[Prompt], times: list[float]) -> Load:
    """Put the load on the server from `options.processes` processes, which take requests in turns.

    Raises:
        OctavoError: one of them ended early.
    """
    command = (sys.executable, "-m", "octavo.bench_client.load")
    children: list[Process] = []
    try:
        for number in range(options.processes):
            mine = slice(number, None, options.processes)
            places = options.max_concurrency and len(range(options.max_concurrency)[mine])
            one = Share(replace(options, processes=1, max_concurrency=places), prompts[mine], times[mine])
            # A session of its own: only this process gets Ctrl-C.
            child = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            children.append(child)
            _write(child, msgspec.msgpack.encode(one).hex())
        await asyncio.gather(*(_read(child, b"ready\n") for child in children))
        begin_s = time.perf_counter() + _START_S
        for child in children:
            _write(child, repr(begin_s))
        reports = await asyncio.gather(*map(_read, children))
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
            await child.wait()
    return merged([msgspec.msgpack.decode(one, type=Load) for one in reports], begin_s)


def merged(loads: list[Load], begin_s: float) -> Load:
    """Merge loads that began at the same time. The share of a core is that of the busiest process."""
    answers = sorted((answer for load in loads for answer in load.answers), key=lambda answer: answer.due_s)
    changes = sorted(change for one in answers for change in ((one.sent_s, 1), (one.end_s, -1)))
    return Load(
        answers,
        duration_s=max(answer.end_s for answer in answers) - begin_s,
        peak_concurrency=max(accumulate(change for _, change in changes)),
        lags_s=[lag_s for load in loads for lag_s in load.lags_s],
        cpu_share=max(load.cpu_share for load in loads),
    )


def _write(child: Process, line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line.encode() + b"\n")


async def _read(child: Process, expected: bytes | None = None) -> bytes:
    """Return a child's line, or all until its end if no line is expected."""
    assert child.stdout is not None
    found = await (child.stdout.readline() if expected else child.stdout.read())
    if (found != expected) if expected else await child.wait():
        raise OctavoError(f"a process of the client ended early, with exit status {await child.wait()}")
    return found


def _end_with_parent() -> None:
    # The parent's end of the pipe is closed when the parent is gone.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    share = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Share)
    print("ready", flush=True)
    begin_s = float(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.buffer.write(msgspec.msgpack.encode(asyncio.run(share.send(begin_s))))
