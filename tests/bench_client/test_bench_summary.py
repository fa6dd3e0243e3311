"""Figures from times that are known exactly."""

import json
from typing import Any

import numpy as np
import pytest

from octavo.bench_client.client import Answer, EventReader, Usage
from octavo.bench_client.load import Load
from octavo.bench_client.options import LoadOptions
from octavo.bench_client.summary import summarise
from octavo.bench_client.workload import arrival_times


def answer(sent_s: float, *token_s: float, num_output: int | None = None, **fields: Any) -> Answer:
    usage = Usage(10, len(token_s) if num_output is None else num_output)
    times = [sent_s + time for time in token_s]
    # It was due long before: that is the client's affair.
    return Answer(
        sent_s - 0.3, sent_s - 0.2, sent_s, times, times[-1] if times else sent_s, usage, 3, **fields
    )


def test_percentiles_are_exact() -> None:
    answers = [answer(number, 0.001 * (number + 1), 0.5, 1.0) for number in range(101)]
    figures = summarise(LoadOptions(), Load(answers, duration_s=10.0, peak_concurrency=5))
    wanted = {"mean": 51, "median": 51, "p90": 91, "p99": 100, "max": 101}
    for name, value in wanted.items():
        assert figures[f"{name}_ttft_ms"] == pytest.approx(value)
    assert figures["mean_e2el_ms"] == pytest.approx(1000)
    assert figures["median_tpot_ms"] == pytest.approx((1000 - 51) / 2)
    assert figures["max_itl_ms"] == pytest.approx(500)
    gaps = [gap for number in range(101) for gap in (499 - number, 500)]
    assert figures["p90_itl_ms"] == pytest.approx(np.percentile(gaps, 90))
    assert figures["output_throughput"] == pytest.approx(30.3)
    assert figures["total_token_throughput"] == pytest.approx(131.3)
    assert figures["request_throughput"] == pytest.approx(10.1)
    assert figures["max_concurrent_requests"] == 5
    assert json.loads(json.dumps(figures)) == figures


def test_first_requests_stand_beside_the_rest() -> None:
    answers = [answer(number, 2.0 if number < 2 else 0.1, 2.1) for number in range(20)]
    first = summarise(LoadOptions(), Load(answers[::-1], duration_s=1.0))["first_requests"]
    assert first["number"] == 2
    assert first["first_ttft_ms"] == first["ttft_ms"]["median"] == pytest.approx(2000)
    assert first["ttft_ms_of_the_rest"]["max"] == pytest.approx(100)


def test_several_tokens_in_an_event_and_one_token() -> None:
    figures = summarise(
        LoadOptions(), Load([answer(0, 1.0, 3.0, num_output=5), answer(0, 1.0)], duration_s=1.0)
    )
    assert figures["tokens_per_event"] == 2
    # Of a single token there is no time per token.
    assert figures["mean_tpot_ms"] == figures["max_tpot_ms"] == pytest.approx(500)


def test_goodput_counts_those_that_keep_all_limits() -> None:
    answers = [answer(0, 0.1, 0.2), answer(0, 0.3, 0.4), answer(0, 0.1, 0.9), answer(0, error="no")]
    for limits, number in (("ttft:200",), 2), (("ttft:200", "tpot:100"), 1), (("e2el:899",), 2):
        figures = summarise(LoadOptions(goodput=limits), Load(answers, duration_s=4.0))
        assert figures["request_goodput"] == pytest.approx(number / 4)
    assert summarise(LoadOptions(), Load(answers, duration_s=4.0))["request_goodput"] is None


def test_a_busy_client_says_so() -> None:
    load = Load([answer(0, 1.0)], duration_s=1.0, lags_s=[0.5], cpu_share=0.95)
    late, busy = summarise(LoadOptions(), load)["warnings"]
    assert "500.0 ms" in late
    assert "95%" in busy


def test_arrivals() -> None:
    def gaps(burstiness: float) -> np.ndarray:
        options = LoadOptions(num_prompts=20_000, request_rate=50, burstiness=burstiness)
        assert arrival_times(options) == arrival_times(options)
        return np.diff(arrival_times(options))

    for burstiness in (0.25, 1.0, 16.0):
        found = gaps(burstiness)
        assert found.mean() == pytest.approx(1 / 50, rel=0.05)
        assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrival_times(LoadOptions(num_prompts=3)) == [0, 0, 0]


def test_events_in_pieces_of_any_size() -> None:
    stream = (
        b': ping\r\n\r\ndata:{"choices":[{"text":"\xc3\xa9","index":0}],"more":[1]}\r\n\r\nevent: x\n'
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{"reasoning_content":"r"}}]}\n\ndata: {"choices":[{"delta":'
        b'{"tool_calls":[{"index":0}]},"finish_reason":"stop"}]}\n\ndata: {"choices":[],"usage":'
        b'{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 2, 7, 64, len(stream)):
        reader = EventReader()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        events = [event for piece in pieces for event in reader.read(piece)]
        assert [[choice.has_tokens for choice in event.choices] for event in events] == [
            [True],
            [False],
            [True],
            [True],
            [],
        ]
        assert events[-1].usage == Usage(1, 2)
        assert events[3].choices[0].finish_reason == "stop"
        assert reader.is_done
