"""Whatever breaks a call off, and wherever: later answers are right, other requests go on, nothing leaks."""

import dataclasses
import linecache
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import pytest
from llm_helpers import assert_drained
from test_ahead import ahead

from octavo import LLM, SamplingParams
from octavo.engine.model_runner import ModelRunner
from octavo.outputs import RequestOutput

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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_blocks_of_a_step_that_was_broken_off_are_never_hit(
    tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Trap: prompt blocks are shared from the moment they are scheduled, and an interrupt left them so."""
    llm = tiny()
    expected = tokens(llm)
    llm.generate([[i % 90 + 1 for i in range(200)]], PARAMS[0])
    llm.reset_prefix_cache()
    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            raise error

        patch.setattr(ModelRunner, "_forward", broken)
        outcome = None
        with suppress(error):
            outcome = llm.generate(PROMPTS, PARAMS, on_error="return")
        assert outcome is None or all(output.error is not None for output in outcome)
    assert_drained(llm)
    output = llm.generate(PROMPTS[1], PARAMS[0])[0]
    assert output.num_cached_tokens == 0
    assert tokens(llm) == expected


@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
def test_interrupts_at_random_moments(tiny: MakeLLM, runs_ahead: bool) -> None:
    """A timer's signal, hundreds of times: golden tokens, whole streams, sound pool, nothing left."""
    print(f"seed {SEED}, {NUM_INTERRUPTS} interrupts")
    rng = random.Random(SEED)
    llm = tiny(num_blocks=12, max_num_batched_tokens=16)

    def run() -> list[list[list[int]]]:
        return [[c.token_ids for c in output.outputs] for output in llm.generate(PROMPTS, SHORT_PARAMS)]

    expected, expected_stream = run(), streamed(llm)
    if runs_ahead:
        llm, _ = ahead(llm)
    start = time.perf_counter()
    assert run() == expected
    duration_s = time.perf_counter() - start
    num_interrupts = 0
    with alarm() as it:
        while num_interrupts < NUM_INTERRUPTS // 2:
            stream = llm.stream(STREAMED, STREAM_PARAMS)
            seen = list(next(stream).token_ids)
            for _ in range(rng.randrange(1, 31)):
                num_interrupts += it.interrupts(run, rng.random() * duration_s + 1e-5)
            seen += [token for delta in stream for token in delta.token_ids]
            assert seen == expected_stream
            assert_drained(llm)
            if rng.random() < 0.1:
                assert run() == expected
    assert run() == expected
    assert_drained(llm)


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


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("num_blocks", [12, 64], ids=["scarce", "plenty"])
def test_an_interrupt_at_any_line(tiny: MakeLLM, num_blocks: int, runs_ahead: bool) -> None:
    """Every so many lines of a short run; the seed says which, so that many runs reach them all."""
    llm = tiny(num_blocks=num_blocks, max_num_batched_tokens=24)
    prompts, params = PROMPTS[:3], PARAMS[:3]

    def run() -> list[list[list[int]]]:
        return [[c.token_ids for c in output.outputs] for output in llm.generate(prompts, params)]

    print(f"seed {SEED}, every {LINE_STRIDE}th line")
    expected, expected_stream = run(), streamed(llm)
    if runs_ahead:
        llm, _ = ahead(llm)
    llm.reset_prefix_cache()
    total = octavo_lines(run, -1)
    for stop_at in range(1 + SEED % LINE_STRIDE, total, LINE_STRIDE):
        llm.reset_prefix_cache()
        stream = llm.stream(STREAMED, STREAM_PARAMS)
        seen = list(next(stream).token_ids)
        with pytest.raises(KeyboardInterrupt):
            octavo_lines(run, stop_at)
        assert llm.stats.num_running + llm.stats.num_waiting == 1, f"line {stop_at} of {total}"
        seen += [token for delta in stream for token in delta.token_ids]
        assert seen == expected_stream, f"line {stop_at} of {total}"
        assert_drained(llm)
        if stop_at % 5 == 0:
            assert run() == expected, f"line {stop_at} of {total}"
    assert run() == expected


def test_a_second_interrupt_while_the_first_is_cleaned_up(tiny: MakeLLM) -> None:
    """Trap: Ctrl-C twice; the cleaning up itself is broken off, at any of its lines."""
    llm = tiny()
    expected = tokens(llm)

    def interrupted_twice(second_at: int) -> int:
        forward = ModelRunner._forward
        ModelRunner._forward = raise_interrupt  # type: ignore[assignment,method-assign]
        try:
            return octavo_lines(lambda: tokens(llm), second_at)
        finally:
            ModelRunner._forward = forward  # type: ignore[method-assign]

    for second_at in range(1 + SEED % 5, 1500, 5):
        with pytest.raises(KeyboardInterrupt):
            interrupted_twice(second_at)
        assert llm.stats.num_running + llm.stats.num_waiting == 0, f"line {second_at}"
        assert_drained(llm)
        if second_at % 20 == 0:
            assert tokens(llm) == expected, f"line {second_at}"
    assert tokens(llm) == expected


def test_a_stream_closed_before_its_first_delta_is_aborted(tiny: MakeLLM) -> None:
    """Trap: a generator that was never begun runs none of its code when it is closed."""
    llm = tiny()
    for _ in range(3):
        llm.stream(STREAMED, STREAM_PARAMS).close()
    assert llm.stats.num_waiting == 0
    assert_drained(llm)


def test_a_stream_dropped_before_its_first_delta_is_aborted(tiny: MakeLLM) -> None:
    llm = tiny()
    for _ in range(3):
        llm.stream(STREAMED, STREAM_PARAMS)
    assert llm.stats.num_waiting == 0
    stream = llm.stream(STREAMED, STREAM_PARAMS)
    next(stream)
    del stream
    assert llm.stats.num_running == 0
    assert_drained(llm)


def test_a_stream_that_nobody_reads_collects_nothing(tiny: MakeLLM) -> None:
    """Its tokens are in its output once, and come in one delta when somebody asks."""
    llm = tiny()
    stream = llm.stream(STREAMED, STREAM_PARAMS)
    first = next(stream)
    tokens(llm)
    rest = list(stream)
    assert [*first.token_ids, *(t for delta in rest for t in delta.token_ids)] == streamed(llm)
    assert len(rest) < 23
    assert list(stream) == []


def test_an_aborted_request_without_tokens_has_the_logprobs_it_asked_for(tiny: MakeLLM) -> None:
    llm = tiny()
    stream = llm.stream(STREAMED, STREAM_PARAMS)
    other = llm.engine.add_request(STREAMED, STREAM_PARAMS)
    llm.abort(other.request_id)
    assert other.outputs[0].finish_reason == "abort"
    assert other.outputs[0].logprobs == []
    assert other.outputs[0].cumulative_logprob == 0.0
    stream.close()
    assert_drained(llm)


def test_request_ids_never_collide(tiny: MakeLLM) -> None:
    """Trap: a user's id equal to a running number made two requests one."""
    llm = tiny()
    mine = llm.engine.add_request([5, 6], PARAMS[0], request_id="2")
    others = llm.generate([[1], [2], [3], [4]], PARAMS[0])
    assert mine.request_id == "2"
    assert "2" not in {output.request_id for output in others}
    assert len({output.request_id for output in others}) == 4
    assert mine.outputs[0].token_ids == llm.generate([5, 6], PARAMS[0])[0].outputs[0].token_ids
    running = llm.engine.add_request([5, 6], PARAMS[0])
    for request_id in (running.request_id, "", 7):
        with pytest.raises(ValueError, match="request_id"):
            llm.engine.add_request([1], PARAMS[0], request_id=request_id)  # type: ignore[arg-type]
    llm.abort(running.request_id)
    assert_drained(llm)


@pytest.mark.parametrize("salt", [None, 5, b"salt"])
def test_a_salt_that_is_no_string_is_refused(tiny: MakeLLM, salt: object) -> None:
    llm = tiny()
    with pytest.raises(ValueError, match="cache_salt"):
        llm.generate([1, 2], PARAMS[0], cache_salt=salt)  # type: ignore[arg-type]
    assert llm.generate([1, 2], PARAMS[0], cache_salt="\udcff")[0].error is None
    assert_drained(llm)


def test_threads_may_call_one_llm(tiny: MakeLLM) -> None:
    """Four threads of generate, stream and score: each gets its own answers."""
    llm = tiny()
    expected, expected_stream = tokens(llm), streamed(llm)
    expected_score = llm.score(COMMON, [[5], [6, 7]])
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for _ in range(6):
                wrong.extend([number] * (tokens(llm) != expected))
                wrong.extend([number] * (streamed(llm) != expected_stream))
                score = llm.score(COMMON, [[5], [6, 7]])
                wrong.extend(
                    [number] * ([s.token_ids for s in score] != [s.token_ids for s in expected_score])
                )
                llm.stream(STREAMED, STREAM_PARAMS)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert llm.stats.num_waiting == 0
    assert_drained(llm)


def test_a_thread_that_streams_is_not_starved(tiny: MakeLLM) -> None:
    """Its deltas come while another thread's run goes on, which takes thousands of times as many steps."""
    llm = tiny({"max_position_embeddings": 30_000}, num_blocks=8_000)
    outputs: list[RequestOutput] = []

    def run_long() -> None:
        outputs.extend(llm.generate([1, 2, 3], SamplingParams(max_tokens=20_000, ignore_eos=True)))

    thread = threading.Thread(target=run_long)
    thread.start()
    while llm.stats.num_running == 0:
        time.sleep(0.001)
    stream = llm.stream([4, 5, 6], SamplingParams(max_tokens=5, ignore_eos=True))
    assert sum(len(delta.token_ids) for delta in stream) == 5
    llm.abort("0")
    thread.join()
    assert outputs[0].outputs[0].finish_reason == "abort"
    assert_drained(llm)


def test_a_call_from_a_signal_handler_is_refused(tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for itself; the call that it came into goes on."""
    llm = tiny()
    expected = tokens(llm)
    forward = ModelRunner._forward
    caught: list[Exception] = []

    def calls_back(self: ModelRunner, *arguments: object) -> object:
        try:
            llm.generate([1, 2], PARAMS[0])
        except Exception as error:
            caught.append(error)
        return forward(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "_forward", calls_back)
    assert tokens(llm) == expected
    assert "signal handler" in str(caught[0])
    assert_drained(llm)
