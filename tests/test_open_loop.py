"""Latency under load: arrivals, the arithmetic of figures, and the script on a tiny model."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def benchmarks_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_arrivals_are_a_poisson_process_that_a_seed_fixes() -> None:
    import numpy as np
    from support.open_loop import poisson_arrivals

    arrivals = poisson_arrivals(40, 100, 3, (5, 9), (2, 4))
    assert arrivals == poisson_arrivals(40, 100, 3, (5, 9), (2, 4))
    assert arrivals != poisson_arrivals(40, 100, 4, (5, 9), (2, 4))
    assert {len(arrival.prompt) for arrival in arrivals} == {5, 6, 7, 8, 9}
    assert {arrival.max_tokens for arrival in arrivals} == {2, 3, 4}
    times = np.array([arrival.time_s for arrival in arrivals])
    gaps = np.diff(times)
    assert (gaps > 0).all()
    assert times[-1] < 100
    # Exponential: the standard deviation is the mean. 4000 gaps: five standard errors.
    assert len(arrivals) == pytest.approx(4000, rel=5 / 4000**0.5)
    assert gaps.std() == pytest.approx(1 / 40, rel=0.1)


def test_percentiles_are_in_milliseconds() -> None:
    from support.open_loop import percentiles_ms

    figures = percentiles_ms([value / 1000 for value in range(101)])
    assert figures == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert percentiles_ms([0.001, 0.002]) == {"p50": 1.5, "p90": 1.9, "p99": 1.99, "max": 2.0}
    assert percentiles_ms([]) is None


def test_quarters_go_by_time_and_the_last_one_has_what_comes_later() -> None:
    import numpy as np
    from support.open_loop import by_quarter

    quarters = by_quarter(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 2.49, 2.5, 99.0]), 10.0)
    assert [quarter and (quarter["p50"], quarter["max"]) for quarter in quarters] == [
        (1500.0, 2000.0),
        (3000.0, 3000.0),
        None,
        (4000.0, 4000.0),
    ]


def test_waits_that_overlap_are_one_pause() -> None:
    from support.open_loop import pauses

    assert pauses([[0.0, 0.05, 0.1], [3.0]]) == {"number": 0, "seconds": 0.0}
    waits = [[1.0, 1.2, 1.21], [1.1, 1.3], [1.15, 1.17], [5.0, 5.5, 6.0]]
    found = pauses(waits)
    assert found["number"] == 3
    assert found["seconds"] == pytest.approx(0.3 + 1.0)


def test_stalls_are_steps_over_the_limit() -> None:
    from support.open_loop import summarise_steps

    steps = summarise_steps([0.01, 0.05, 0.06, 0.3, 0.02])
    assert steps is not None
    assert steps == pytest.approx(
        {"number": 5, "median_ms": 50, "longest_ms": 300, "stalls": 2, "stalled_s": 0.36}
    )
    assert summarise_steps([]) is None


def test_a_run_in_figures() -> None:
    """Two requests: due at 0 and 3 s, three tokens and one."""
    from support.open_loop import Arrival, Trace, summarise

    arrivals = [Arrival(0.0, [1] * 10, 3), Arrival(3.0, [1] * 20, 1)]
    figures = summarise(arrivals, Trace([[0.5, 0.6, 1.5], [4.0]], [0.1, 3.2], [0.04, 0.5]), 4.0)
    assert figures["output_tokens"] == 4
    assert figures["output_tokens_per_s"] == 1.0
    assert figures["ttft_ms"]["max"] == 1000.0
    quarters = [quarter and quarter["max"] for quarter in figures["ttft_ms_by_quarter"]]
    assert quarters == [500.0, None, None, 1000.0]
    quarters = [quarter and quarter["max"] for quarter in figures["inter_token_ms_by_quarter"]]
    assert quarters == [100.0, 900.0, None, None]
    assert figures["pauses"] == {"number": 2, "seconds": pytest.approx(1.0)}
    assert figures["last_added_late_s"] == pytest.approx(0.2)
    assert figures["seconds_after_last_arrival"] == 1.0
    # 11 tokens for 0.1 s, then 12 for 0.9 s, of 4 s.
    assert figures["mean_kv_tokens"] == pytest.approx((11 * 0.1 + 12 * 0.9) / 4)


def test_the_bound_of_a_decode_step() -> None:
    from gpu_open_loop import add_bounds
    from support.gpu_bound import step_bytes

    engine = {"runs": [{"mean_kv_tokens": 1000.0, "inter_token_ms": {"p50": 4.0}}]}
    add_bounds(engine, "0.6b", step_bytes("0.6b", 1000) * 1e3)
    assert engine["runs"][0]["decode_bound_ms"] == pytest.approx(1.0)
    assert engine["runs"][0]["of_bound"] == pytest.approx(0.25)


def test_a_child_that_prints_no_figures_is_an_error_and_one_that_hangs_is_killed() -> None:
    from support.child import ChildError, run_child

    figures = 'import time; print(\'{"a": 1, "ready_at": %f}\' % time.time(), flush=True);'
    with pytest.raises(ChildError, match="exit status 3"):
        run_child(["-c", "print('a log'); raise SystemExit(3)"], 60)
    with pytest.raises(ChildError, match="exit status -9"):
        run_child(["-c", "import time; time.sleep(60)"], 0.5)
    found = run_child(["-c", figures + "print('a log after it'); time.sleep(60)"], 3)
    assert found == {"a": 1, "process_ready_s": pytest.approx(1.5, abs=1.5)}


def test_what_a_child_leaves_behind_is_killed_and_not_waited_for(tmp_path: Path) -> None:
    from support.child import run_child

    noted = tmp_path / "pid"
    code = f"""
import os, pathlib, subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({str(noted)!r}).write_text(str(left.pid))
print('{{"ready_at": 0}}', flush=True)
os._exit(0)
"""
    begun = time.monotonic()
    run_child(["-c", code], 50)
    assert time.monotonic() - begun < 40
    status = Path(f"/proc/{noted.read_text()}/stat")
    assert not status.exists() or status.read_text().split(") ")[1].startswith("Z")


def test_sigterm_ends_the_child_too_and_figures_known_by_then_are_printed(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    child = (
        f"import os, pathlib, time; pathlib.Path({str(noted)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    code = f"""
from support.child import run_child
run_child(["-c", "print('{{\\"a\\": 1, \\"ready_at\\": 0}}')"], 50)
run_child(["-c", {child!r}], 50)
"""
    script = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 40
    while not (noted.exists() and noted.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    script.terminate()
    _, errors = script.communicate(timeout=40)
    assert '{"a": 1, "ready_at": 0}' in errors
    status = Path(f"/proc/{noted.read_text()}/stat")
    assert not status.exists() or status.read_text().split(") ")[1].startswith("Z")


@pytest.mark.slow
def test_the_script_on_a_tiny_model(tmp_path: Path) -> None:
    """From the command line to the last line, each engine in a process of its own."""
    options = (
        "--model tiny --peer none --rate 60 --seconds 0.5 --prompt-len 5 60 --output-len 1 20 --repeat 2"
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_open_loop.py"), *options.split()]
    done = subprocess.run([*command, "--commit", "abc1234"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TTFT ms: p50 / p90 / p99 / max" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["machine"]["commit"] == "abc1234"
    assert list(report["engines"]) == ["Octavo", "Octavo, started again"]
    for engine in report["engines"].values():
        assert 0 < engine["ready_s"] < engine["process_ready_s"]
        assert engine["late_work"] == {"compiled": 0, "captured": 0, "allocated": 0}
        assert len(engine["runs"]) == 2
        for run in engine["runs"]:
            assert run["requests"] > 10
            assert run["ttft_ms"]["p50"] > 0
            assert run["steps"]["number"] > 20


def test_the_first_use_of_each_option_is_measured() -> None:
    from support.gpu_model import load
    from support.open_loop_engine import measure_special

    engine = load("tiny", num_blocks=4096).engine
    figures = measure_special(engine, num_plain=3, num_steps=4, num_tokens=2)
    options = ["plain", "top_p", "logprobs", "frequency_penalty", "seed", "prompt_logprobs"]
    assert [row["option"] for row in figures] == options
    assert all(row["steps"] >= 2 and row["longest_ms"] > 0 for row in figures)
    assert not engine.has_unfinished_requests


def test_max_step_ms_goes_to_the_engine_only_if_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_open_loop

    seen = []
    monkeypatch.setattr(
        gpu_open_loop, "run_child", lambda command, limit: seen.append(command) or {"runs": []}
    )
    settings = {"model": "tiny", "rate": 1.0, "seconds": 1.0, "seed": 0, "repeat": 1, "peer": "none"}
    settings |= {"prompt_len": [1, 2], "output_len": [1, 2], "special": False, "limit": 1.0, "cold": False}
    settings["closed"] = None
    gpu_open_loop.measure(SimpleNamespace(**settings, max_step_ms=[]))
    gpu_open_loop.measure(SimpleNamespace(**settings | {"cold": True}, max_step_ms=["20", "none"]))
    options = [json.loads(command[-1])["options"] for command in seen]
    assert options[:2] == [{}, {}]
    assert [sorted(chosen) for chosen in options[2:]] == [
        ["kernel_cache_dir"],
        ["kernel_cache_dir", "max_step_ms"],
        ["kernel_cache_dir", "max_step_ms"],
    ]
    assert [chosen["max_step_ms"] for chosen in options[3:]] == [20.0, None]
    assert options[2]["kernel_cache_dir"]


def test_the_model_gives_every_token_and_shares_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from open_loop_model import WEIGHTS, Device, bursts, run

    from octavo.engine.step import scheduled

    arrivals = bursts(24, 1e-3)
    num_long = []
    for short_step_s in (0.0, 0.016):
        monkeypatch.setattr(scheduled, "SHORT_STEP_S", short_step_s)
        trace = run(arrivals, Device(WEIGHTS["0.6b"], None))
        for arrival, times in zip(arrivals, trace.token_times, strict=True):
            assert len(times) == arrival.max_tokens
            assert arrival.time_s < times[0]
            assert times == sorted(times)
        num_long.append(sum(step > 5e-3 for step in trace.steps))
        # Nobody joins a step that is guessed to be longer; what a few steps teach is exact here.
        assert max(trace.steps) < max(short_step_s, 0.0125)
    assert num_long[1] < num_long[0]
