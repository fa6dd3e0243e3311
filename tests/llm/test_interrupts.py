"""Whatever breaks a call off, and wherever: later answers are right, other requests go on, nothing leaks."""

import random
import time
from contextlib import suppress

import pytest
from alarms import alarm
from interrupt_helpers import (
    LINE_STRIDE,
    NUM_INTERRUPTS,
    PARAMS,
    PROMPTS,
    SEED,
    SHORT_PARAMS,
    STREAM_PARAMS,
    STREAMED,
    MakeLLM,
    octavo_lines,
    raise_interrupt,
    streamed,
    tokens,
)
from llm_helpers import assert_drained
from test_ahead import ahead

from octavo.engine.model_runner import ModelRunner


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
