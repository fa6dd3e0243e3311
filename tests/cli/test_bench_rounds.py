"""`octavo bench prefix` tells a ratio from noise; the times here are given, not measured."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from octavo.cli import main
from octavo.cli.bench import prefix
from octavo.cli.bench.rounds import MAX_TRIES, NUM_ROUNDS, compare, timer

QUIET = itertools.repeat(2.0)


def taking(seconds: Iterator[float]) -> Callable[[], float]:
    return lambda: next(seconds)


def noise() -> Iterator[float]:
    return itertools.cycle([0.5, 1.0, 2.0, 4.0, 8.0])


def test_a_quiet_machine_gives_the_ratio_at_once() -> None:
    found = compare(taking(QUIET), taking(itertools.cycle([1.0, 1.02, 0.98])))
    assert (found.first_s, found.second_s, found.num_tries) == (2.0, 1.0, 1)
    assert 1.95 < found.low <= found.ratio <= found.high < 2.05
    assert found.ratio == 2.0
    assert not found.is_noise


def test_a_few_slow_rounds_change_nothing() -> None:
    """As when another process runs for a moment."""
    slow = itertools.cycle([1.0] * (NUM_ROUNDS - 1) + [50.0])
    found = compare(taking(QUIET), taking(slow))
    assert (found.ratio, found.num_tries, found.is_noise) == (2.0, 1, False)


def test_what_slows_down_whole_rounds_cancels_out() -> None:
    """As a clock that falls: both calls take three times as long."""
    pace = [1.0, 3.0, 2.0, 1.0, 5.0]
    found = compare(taking(itertools.cycle(2 * factor for factor in pace)), taking(itertools.cycle(pace)))
    assert (found.ratio, found.low, found.high, found.num_tries) == (2.0, 2.0, 2.0, 1)


def test_noise_is_measured_again_and_then_said_to_be_noise() -> None:
    found = compare(taking(noise()), taking(QUIET))
    assert found.is_noise
    assert found.num_tries == MAX_TRIES


def test_a_machine_that_becomes_quiet_gives_the_ratio_of_then() -> None:
    loud = itertools.chain(itertools.islice(noise(), NUM_ROUNDS), itertools.repeat(6.0))
    found = compare(taking(loud), taking(QUIET))
    assert (found.ratio, found.num_tries, found.is_noise) == (3.0, 2, False)


def test_a_call_is_timed() -> None:
    calls: list[None] = []
    timed = timer(lambda: calls.append(None), torch.device("cpu"))
    assert timed() > 0
    # Once before it counts.
    assert len(calls) == 2


PREFIX = (
    *("bench", "prefix", "--device", "cpu", "--batch-sizes", "2", "--context-len", "12"),
    *("--block-size", "4", "--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "8"),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[Iterator[float]]], None]:
    """Give the times of each timed call: flat and forest of each point."""
    monkeypatch.setattr(prefix, "_ROUND_BYTES", {"cpu": 1 << 12})
    return lambda times: monkeypatch.setattr(prefix, "timer", lambda call, device: taking(next(times)))


def test_noise_has_no_figure(
    clock: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    clock(iter([QUIET, itertools.repeat(1.0), noise(), QUIET, QUIET, itertools.repeat(0.5)]))
    main([*PREFIX, "--plot", str(tmp_path / "curve.svg")])
    written = capsys.readouterr()
    points = json.loads(written.out.splitlines()[-1])["points"]
    assert [point["speedup"] for point in points] == [2.0, None, 4.0]
    assert [point["num_tries"] for point in points] == [1, MAX_TRIES, 1]
    assert "2.00x (2.00-2.00)" in written.out
    assert written.out.count("noise (") == 1
    assert "warning: the times of 1 of 3 points differ too much from round to round" in written.err


def test_nothing_but_noise_is_an_error(
    clock: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    clock(iter([noise(), QUIET] * 3))
    with pytest.raises(SystemExit) as caught:
        main([*PREFIX])
    assert caught.value.code == 2
    written = capsys.readouterr()
    assert written.err.startswith("octavo: error: the times of 3 of 3 points differ too much")
    assert len(json.loads(written.out.splitlines()[-1])["points"]) == 3
