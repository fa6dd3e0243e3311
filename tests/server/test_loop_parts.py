"""Parts of the loop alone: cutting deltas beside a writer, histograms, the waiting room."""

import random
from collections.abc import Iterator

import pytest

from octavo.errors import QueueFullError
from octavo.outputs import CompletionDelta, CompletionOutput, DeltaReader, Logprob, RequestOutput
from octavo.server.loop import jobs
from octavo.server.loop.jobs import WaitingRoom
from octavo.server.loop.stats import SECONDS, Histogram


class Writer:
    """Writes outputs as output_processor.py does, some writes further whenever a reader touches a field."""

    def __init__(self, rng: random.Random, num_completions: int, num_tokens: int) -> None:
        self._rng, self._writes, self._is_writing = rng, self._write(num_tokens), True
        self.completions = [Beside(index, logprobs=[]) for index in range(num_completions)]
        self.output = BesideOutput("a", None, [1], list(self.completions))
        for part in (*self.completions, self.output):
            WRITERS[id(part)] = self
        self._is_writing = False

    def go_on(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            for _ in range(self._rng.choice([0, 0, 1, 2, 5])):
                next(self._writes, None)
            self._is_writing = False

    def _write(self, num_tokens: int) -> Iterator[None]:
        for number in range(num_tokens):
            for completion in self.completions:
                assert completion.logprobs is not None
                completion.logprobs.append({number: Logprob(-1.0, 1)})
                yield
                completion.token_ids.append(number)
                yield
                completion.text += f"{number},"
                yield
        for completion in self.completions:
            completion.finish_reason = "length"
            yield
        self.output.finished = True


WRITERS: dict[int, Writer] = {}


class Beside(CompletionOutput):
    """A completion that is written to between any two looks at it."""

    def __getattribute__(self, name: str) -> object:
        if id(self) in WRITERS:
            WRITERS[id(self)].go_on()
        return super().__getattribute__(name)


class BesideOutput(RequestOutput):
    """Likewise an output."""

    def __getattribute__(self, name: str) -> object:
        if id(self) in WRITERS:
            WRITERS[id(self)].go_on()
        return super().__getattribute__(name)


@pytest.mark.parametrize("num_completions", [1, 3])
@pytest.mark.parametrize("seed", range(30))
def test_deltas_cut_beside_a_writer_add_up(num_completions: int, seed: int) -> None:
    writer = Writer(random.Random(seed), num_completions, num_tokens=30)
    reader, deltas = DeltaReader(writer.output), []
    while not deltas or deltas[-1].output is None:
        deltas += reader.read()
    WRITERS.clear()
    assert reader.read() == []
    assert sum(delta.output is not None for delta in deltas) == 1
    for index, completion in enumerate(writer.completions):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == completion.text == "".join(f"{n}," for n in range(30))
        assert [token for delta in mine for token in delta.token_ids] == list(range(30))
        assert [entry for delta in mine for entry in delta.logprobs or ()] == completion.logprobs
        # No text comes before its tokens, no token before its log-probabilities.
        for end in range(len(mine)):
            text = "".join(delta.text for delta in mine[:end])
            assert text.count(",") <= sum(len(delta.token_ids) for delta in mine[:end])
        assert all(len(delta.token_ids) == len(delta.logprobs or ()) for delta in mine)
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]


def test_the_end_of_the_last_completion_waits_for_the_end_of_all() -> None:
    """Trap: a reader between the two writes saw all end, and after that no delta to carry the output."""
    output = RequestOutput("a", None, [1], [CompletionOutput(0), CompletionOutput(1)])
    reader = DeltaReader(output)

    def read() -> list[tuple[int, str | None, bool]]:
        deltas: list[CompletionDelta] = reader.read()
        return [(delta.index, delta.finish_reason, delta.output is not None) for delta in deltas]

    output.outputs[1].finish_reason = "stop"
    assert read() == [(1, "stop", False)]
    output.outputs[0].token_ids.append(4)
    output.outputs[0].finish_reason = "length"
    assert read() == [(0, None, False)]
    assert read() == []
    output.finished = True
    assert read() == [(0, "length", True)]
    assert read() == []


def test_quantiles_of_a_histogram_are_within_a_bucket() -> None:
    rng, histogram = random.Random(0), Histogram()
    assert histogram.snapshot().quantile(0.5) is None
    values = sorted(rng.lognormvariate(-4, 1) for _ in range(2000))
    for value in values:
        histogram.observe(value)
    histogram.observe(1e6, 3)
    snapshot = histogram.snapshot()
    assert snapshot.count == 2003
    assert snapshot.counts[-1] == 3
    assert snapshot.total == pytest.approx(sum(values) + 3e6)
    for share in (0.01, 0.5, 0.9, 0.99):
        bound = snapshot.quantile(share)
        assert bound is not None
        exact = values[int(share * 2003)]
        assert bound / 2 <= exact <= bound * 1.01
    assert list(SECONDS) == sorted(set(SECONDS))
    assert snapshot.quantile(1.0) == SECONDS[-1]


def test_a_full_room_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now)
    room = WaitingRoom(100, 1000)
    room.enter(100)
    with pytest.raises(QueueFullError) as refused:
        room.enter(1)
    assert refused.value.retry_after_s == 5
    for _ in range(20):
        now += 0.5
        room.leave(1, 0, begins=True)
        room.enter(1)
    # 2 a second began: the 100 that wait take 50 s.
    assert room.retry_after_s() == pytest.approx(50, rel=0.1)
    now += 100
    assert room.retry_after_s() == 5
