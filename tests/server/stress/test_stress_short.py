"""Short forms of the scripts in this folder: what each shows must hold at any size."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equality
import hostile
import pytest
import signals
import soak
import streams
from server_process import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*streams.OPTIONS) as server:
        yield server


def test_many_streams_of_which_a_third_is_rough(server: ServerProcess) -> None:
    figures = streams.measure(server, num_streams=30, seconds=4)
    assert figures["failures"] == []
    assert figures["num_reads_to_the_end"] >= 10


def test_streamed_texts_are_the_whole_ones(server: ServerProcess) -> None:
    figures = equality.measure(server, num_prompts=3, num_tokens=16)
    assert figures["failures"] == []
    assert (figures["pairs"], figures["chars_not_ascii"] > 30) == (15, True)


@pytest.mark.parametrize(
    ("options", "visits"), [(soak.OPTIONS, soak.VISITS), (soak.EMBEDS, soak.POOLED_VISITS)]
)
def test_visits_of_all_routes_that_may_end_anywhere(
    options: tuple[str, ...], visits: dict[str, soak.Visit], tmp_path: Path
) -> None:
    with ServerProcess(*options, "--batch-dir", str(tmp_path / "batches")) as server:
        found = soak.measure(server, 120, visits)
    # Caches and pools still fill.
    assert [failure for failure in found["failures"] if "memory grows" not in failure] == []


def test_a_part_of_the_hostile_requests(server: ServerProcess) -> None:
    corpus = hostile.corpus()
    assert len(corpus) >= 150
    assert len({(kind, one["name"]) for kind, one in corpus}) == len(corpus)

    requests = [(kind, one["name"], hostile.raw_request(one)) for kind, one in corpus[::6]]
    # Beside other tests everything takes longer; the script is exact.
    assert hostile.broken(hostile.send_all(server.port, requests), limit_s=5.0) == []
    assert server.leftovers() == {}
    assert server.process.poll() is None


@pytest.mark.parametrize("act", [signals.killed, signals.terminated])
def test_a_server_ends_under_load(act: Callable[[], dict[str, Any]]) -> None:
    assert act()["failures"] == []


def test_a_server_stops_and_goes_on_under_load(server: ServerProcess) -> None:
    assert signals.stopped(server, seconds=1.0)["failures"] == []
