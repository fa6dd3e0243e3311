"""What callers may do to an engine, and to each other: abort, hold on to exceptions, call from handlers."""

import gc
import signal
from collections.abc import Callable, Iterator

import pytest
from llm_helpers import assert_drained

from octavo import LLM, SamplingParams
from octavo.engine.model_runner import ModelRunner
from octavo.engine.scheduler import Scheduler
from octavo.errors import EngineError, InvalidArgumentError, PromptError, SamplingParamsError
from octavo.garbage import no_full_collections
from octavo.outputs import RequestOutput

MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_requests_with_ids_of_their_own_draw_different_tokens(tiny: MakeLLM) -> None:
    """Trap: requests without a seed drew by the number of ids that the engine had given out."""
    llm = tiny()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = [llm.engine.add_request([5, 6], params, request_id=name) for name in "abc"]
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


def test_a_stream_broken_off_at_its_start_is_aborted_while_its_exception_is_held(
    tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap: the exception's traceback kept the caller, and with it the request, as in a REPL."""
    llm = tiny()
    add = Scheduler.add

    def broken(self: Scheduler, request: object) -> None:
        add(self, request)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "add", broken)
        with pytest.raises(KeyboardInterrupt) as held:
            llm.stream([5, 6], PARAMS)
    assert held.value.__traceback__ is not None
    assert llm.stats.num_waiting == 0
    assert_drained(llm)


def test_a_score_that_is_aborted_is_an_error(tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap: the tokens computed so far were summed up as if they were all."""
    llm = tiny(max_num_batched_tokens=4)
    wait = llm._wait

    def aborted_meanwhile(output: RequestOutput) -> None:
        """As another thread may, between two steps."""
        llm._shared.call(llm.engine.step)
        llm.abort(output.request_id)
        wait(output)

    monkeypatch.setattr(llm, "_wait", aborted_meanwhile)
    with pytest.raises(EngineError, match="aborted"):
        llm.score([1, 2], [[5] * 20])
    assert_drained(llm)


@pytest.mark.parametrize("continuations", [5, None, "hi", b"hi", {1, 2}], ids=repr)
def test_continuations_that_are_no_list_are_refused(tiny: MakeLLM, continuations: object) -> None:
    with pytest.raises(PromptError, match="continuations must be a list"):
        tiny().score([1], continuations)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{}, [], 0, ""], ids=repr)
def test_parameters_that_are_empty_are_not_the_default(tiny: MakeLLM, params: object) -> None:
    llm = tiny()
    with pytest.raises(SamplingParamsError, match="expected SamplingParams"):
        llm.stream([1], params)  # type: ignore[arg-type]
    assert_drained(llm)


def test_an_id_that_is_no_string_is_refused_and_costs_no_cache(tiny: MakeLLM) -> None:
    llm = tiny()
    llm.generate([1] * 20, PARAMS)
    with pytest.raises(InvalidArgumentError, match=r"must be a string, got \[\]"):
        llm.abort([])  # type: ignore[arg-type]
    assert llm.generate([1] * 20, PARAMS)[0].num_cached_tokens == 16


def test_a_device_that_cannot_start_over_is_a_typed_error(
    tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny()
    expected = llm.generate([1, 2], PARAMS)[0].outputs[0].token_ids

    def broken(*_: object) -> None:
        raise RuntimeError("device gone")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_forward", broken)
        patch.setattr(ModelRunner, "reset", broken)
        for _ in range(2):
            with pytest.raises(EngineError, match="device gone"):
                llm.generate([1, 2], PARAMS)
    assert llm.generate([1, 2], PARAMS)[0].outputs[0].token_ids == expected
    assert_drained(llm)


@pytest.fixture
def handled() -> Iterator[list[Callable[[], object]]]:
    """Functions that a signal handler of SIGUSR1 calls, each once; no deadlock lasts."""
    todo: list[Callable[[], object]] = []

    def handle(*_: object) -> None:
        if todo:
            todo.pop()()

    before = signal.signal(signal.SIGUSR1, handle)
    yield todo
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(60)
def test_a_handler_that_comes_right_after_the_lock_was_taken_does_not_hang(
    tiny: MakeLLM, handled: list[Callable[[], object]]
) -> None:
    """Trap: the thread held the lock, but was not yet known as its holder."""
    llm = tiny()
    caught: list[EngineError] = []

    class Signals(dict[int, None]):
        def pop(self, *arguments: object) -> None:
            signal.raise_signal(signal.SIGUSR1)
            return super().pop(*arguments)  # type: ignore[call-overload]

    def call() -> None:
        with pytest.raises(EngineError, match="signal handler") as refused:
            llm.generate([1], PARAMS)
        caught.append(refused.value)

    handled.append(call)
    llm._shared._waiting = Signals()
    assert len(llm.generate([1, 2], PARAMS)[0].outputs[0].token_ids) == 4
    assert len(caught) == 1
    assert_drained(llm)


def test_a_closed_stream_that_is_dropped_aborts_no_later_request_of_its_id(tiny: MakeLLM) -> None:
    llm = tiny()
    stream = llm.stream([5, 6], PARAMS)
    request_id = next(stream).request_id
    stream.close()
    mine = llm.engine.add_request([5, 6], PARAMS, request_id=request_id)
    del stream
    llm.generate([1], PARAMS)
    assert mine.outputs[0].finish_reason == "length"


def test_an_interrupt_never_leaves_the_garbage_collector_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    change = gc.set_threshold

    def broken(*thresholds: int) -> None:
        change(*thresholds)
        if thresholds != before:
            raise KeyboardInterrupt

    monkeypatch.setattr(gc, "set_threshold", broken)
    with pytest.raises(KeyboardInterrupt), no_full_collections():
        pass
    assert gc.get_threshold() == before
