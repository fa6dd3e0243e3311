"""Requests to interrupt, and interrupts at random moments and at chosen lines."""

import dataclasses
import linecache
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from octavo import LLM, SamplingParams

MakeLLM = Callable[..., LLM]
COMMON = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 3, 5]
PROMPTS = [[*COMMON, 11], [*COMMON, 11, 12, 13, 14], [5, 8], [*COMMON, 11, 12, 13, 14]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=6, n=3, ignore_eos=True),
    SamplingParams(seed=6, max_tokens=8, top_k=9, presence_penalty=1, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, stop_token_ids=[3, 50], ignore_eos=True),
]
SHORT_PARAMS = [dataclasses.replace(params, max_tokens=2) for params in PARAMS]
STREAMED = [9, 9, 8, 7]
STREAM_PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)
# More cases with FUZZ_INTERRUPTS=20000 and the like; a seed repeats a run as nearly as signals can.
NUM_INTERRUPTS = int(os.environ.get("FUZZ_INTERRUPTS", "250"))
LINE_STRIDE = int(os.environ.get("FUZZ_LINE_STRIDE", "1597"))
SEED = int(os.environ.get("FUZZ_SEED", random.randrange(2**32)))


def tokens(llm: LLM) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.outputs] for output in llm.generate(PROMPTS, PARAMS)]


def streamed(llm: LLM) -> list[int]:
    return [token for delta in llm.stream(STREAMED, STREAM_PARAMS) for token in delta.token_ids]


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class Alarm:
    """Raises KeyboardInterrupt once, wherever the main thread is by then."""

    def __init__(self) -> None:
        self.armed = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def interrupts(self, act: Callable[[], object], after_s: float) -> bool:
        """Act; True if the alarm came before the end."""
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, after_s)
            act()
            self.armed = False
        except KeyboardInterrupt:
            return True
        return False


@contextmanager
def alarm() -> Iterator[Alarm]:
    it = Alarm()
    before = signal.signal(signal.SIGALRM, it.handle)
    try:
        yield it
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_block_line(frame: FrameType) -> bool:
    """True at `with` and `try` lines: tracing comes by where no signal is ever handled."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line.startswith("with ") or line == "try:"


def octavo_lines(act: Callable[[], object], stop_at: int) -> int:
    """Act, and raise KeyboardInterrupt at the stop_at-th line that runs in Octavo; returns the lines run."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal num_lines
        if "/octavo/" not in frame.f_code.co_filename or "/layers/" in frame.f_code.co_filename:
            return None
        if event == "line" and not is_block_line(frame):
            num_lines += 1
            if num_lines == stop_at:
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        act()
    finally:
        sys.settrace(before)
    return num_lines
