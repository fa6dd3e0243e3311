"""Streams that nobody reads, ids, salts, and threads that share one LLM."""

import threading
import time

import pytest
from interrupt_helpers import COMMON, PARAMS, STREAM_PARAMS, STREAMED, MakeLLM, streamed, tokens
from llm_helpers import assert_drained

from octavo import SamplingParams
from octavo.engine.model_runner import ModelRunner
from octavo.outputs import RequestOutput


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
