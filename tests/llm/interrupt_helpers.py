"""Requests to interrupt, and interrupts at chosen lines."""

import dataclasses
import linecache
import os
import random
import sys
from collections.abc import Callable
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
