"""A load from several processes, for more streams than one process of Python reads in time.

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
from dataclasses import replace
from itertools import accumulate

import msgspec
from msgspec import Struct

from octavo.bench_client.client import Client
from octavo.bench_client.load import Load, send_load
from octavo.bench_client.options import LoadOptions
from octavo.bench_client.workload import Prompt
from octavo.errors import OctavoError

# From when all children are ready to the first request.
_START_S = 0.1


class Share(Struct):
    """What one of the processes does."""

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
    command = (sys.executable, "-m", "octavo.bench_client.processes")
    children: list[Process] = []
    try:
        for number in range(options.processes):
            mine = slice(number, None, options.processes)
            places = options.max_concurrency and len(range(options.max_concurrency)[mine])
            one = Share(replace(options, processes=1, max_concurrency=places), prompts[mine], times[mine])
            # Ctrl-C is for this process alone.
            child = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            children.append(child)
            _tell(child, msgspec.msgpack.encode(one).hex())
        await asyncio.gather(*(_answer(child, b"ready\n") for child in children))
        begin_s = time.perf_counter() + _START_S
        for child in children:
            _tell(child, repr(begin_s))
        told = await asyncio.gather(*map(_answer, children))
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
            await child.wait()
    return merged([msgspec.msgpack.decode(one, type=Load) for one in told], begin_s)


def merged(loads: list[Load], begin_s: float) -> Load:
    """Return loads that began at the same time as one. The busiest process tells the share of a core."""
    answers = sorted((answer for load in loads for answer in load.answers), key=lambda answer: answer.due_s)
    changes = sorted(change for one in answers for change in ((one.sent_s, 1), (one.end_s, -1)))
    return Load(
        answers,
        duration_s=max(answer.end_s for answer in answers) - begin_s,
        peak_concurrency=max(accumulate(change for _, change in changes)),
        lags_s=[lag_s for load in loads for lag_s in load.lags_s],
        cpu_share=max(load.cpu_share for load in loads),
    )


def _tell(child: Process, line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line.encode() + b"\n")


async def _answer(child: Process, expected: bytes | None = None) -> bytes:
    """Return a child's line, or all until its end if no line is expected."""
    assert child.stdout is not None
    told = await (child.stdout.readline() if expected else child.stdout.read())
    if (told != expected) if expected else await child.wait():
        raise OctavoError(f"a process of the client ended early, with exit status {await child.wait()}")
    return told


def _end_with_parent() -> None:
    # Its end of the pipe is closed when it is gone.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    share = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Share)
    print("ready", flush=True)
    begin_s = float(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.buffer.write(msgspec.msgpack.encode(asyncio.run(share.send(begin_s))))
