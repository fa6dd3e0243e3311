"""The router's view of each replica: its last report, and what was sent to it since.

Use it from one event loop. Nothing here blocks.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from octavo.router.ledger import MAX_REPORTED_MARKS, Report
from octavo.router.marks import Marks
from octavo.router.score import Choice, Weights, choose

# A prompt that was sent counts as cached for this long. After that, only the replica's report counts.
_TRUST_S = 10.0
# A replica that has not reported for this long gets no requests.
_SILENCE_S = 5.0
_BYTES_PER_TOKEN = 4.0


class Replica:
    """One replica, as the router sees it.

    Attributes:
        name: for people.
        report: the latest one; None while the replica is down.
        num_open: requests in flight that this router sent.
        last_chosen: number of the last choice that picked it.
    """

    def __init__(self, name: str, weights: Weights, clock: Callable[[], float]) -> None:
        self.name = name
        self.report: Report | None = None
        self.num_open = self.last_chosen = 0
        self.open_prefill_tokens = 0
        self._weights = weights
        self._clock = clock
        self._reported_s = 0.0
        self._cached: Mapping[bytes, int] = {}
        # Mark -> (tokens, time when it was sent).
        self._sent: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    @property
    def is_ready(self) -> bool:
        """Whether it accepts requests, judging by a recent report."""
        is_recent = self._clock() - self._reported_s < _SILENCE_S
        return is_recent and self.report is not None and self.report.state == "ready"

    @property
    def may_be_ready(self) -> bool:
        """Whether its latest report, if any, says that it accepts requests; the report may be old."""
        return self.report is None or self.report.state == "ready"

    @property
    def load_tokens(self) -> float:
        """Pending prefill, plus a fixed cost for each request in flight, those of other routers included."""
        report = self.report
        num_reported = 0 if report is None else report.num_running + report.num_waiting
        # The reported number includes requests from this router that have arrived.
        num_requests = max(num_reported, self.num_open)
        return self.open_prefill_tokens + self._weights.request_tokens * num_requests

    @property
    def free_tokens(self) -> float:
        """Tokens that fit into blocks that no running request uses."""
        return 0.0 if self.report is None else self.report.free_tokens

    @property
    def num_marks(self) -> int:
        """Number of marks that count as cached there."""
        return len(self._cached) + len(self._sent)

    def saved_tokens(self, marks: Marks) -> int:
        """Return how many tokens of a prompt its cache holds, as far as the router knows."""
        digests, tokens = marks.digests, 0
        at = _longest(digests, self._cached)
        if at >= 0:
            tokens = self._cached[digests[at]]
        at = _longest(digests, self._sent)
        return tokens if at < 0 else max(tokens, self._sent[digests[at]][0])

    def note_report(self, report: Report | None) -> None:
        """Store its report. None means that it is down and its cache is lost."""
        self.report, self._reported_s = report, self._clock()
        if report is None:
            self._cached = {}
            self._sent.clear()
            return
        self._cached = report.cached_marks()
        oldest = self._reported_s - _TRUST_S
        while self._sent and next(iter(self._sent.values()))[1] < oldest:
            self._sent.popitem(last=False)

    def expect(self, marks: Marks, num_tokens: int) -> None:
        """Count a prompt as cached from when it is sent until the replica reports."""
        now = self._clock()
        for digest, end in zip(reversed(marks.digests), reversed(marks.ends), strict=True):
            self._sent[digest] = (num_tokens * end // marks.num_bytes, now)
            self._sent.move_to_end(digest)
        while len(self._sent) > MAX_REPORTED_MARKS:
            self._sent.popitem(last=False)


class Flight:
    """A request in flight.

    Attributes:
        replica: the replica that it was sent to.
        choice: how that replica was chosen.
    """

    def __init__(self, replica: Replica, choice: Choice) -> None:
        self.replica = replica
        self.choice = choice
        self._prefill_tokens = choice.prefill_tokens
        self._is_open = True
        replica.num_open += 1
        replica.open_prefill_tokens += self._prefill_tokens

    def note_first_byte(self) -> None:
        """Record that its prefill is done. Idempotent."""
        self.replica.open_prefill_tokens -= self._prefill_tokens
        self._prefill_tokens = 0

    def end(self) -> None:
        """Record that it ended. Idempotent."""
        self.note_first_byte()
        self.replica.num_open -= self._is_open
        self._is_open = False


class Fleet:
    """All replicas, and the choice among them.

    Attributes:
        replicas: in the order of the given names.
    """

    def __init__(
        self, names: Sequence[str], weights: Weights = Weights(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.replicas = [Replica(name, weights, clock) for name in names]
        self._weights = weights
        self._num_choices = 0

    def send(self, marks: Marks, but: Container[str] = ()) -> Flight | None:
        """Choose a replica for a request and count the request there; None if no replica is ready.

        Args:
            marks: those of its prompt.
            but: names of replicas to skip.
        """
        ready = [replica for replica in self.replicas if replica.is_ready and replica.name not in but]
        num_tokens = num_tokens_of(marks, self.replicas)
        choice = choose(marks, num_tokens, ready, self._weights)
        if choice is None:
            return None
        self._num_choices += 1
        replica = ready[choice.index]
        replica.last_chosen = self._num_choices
        if marks.digests:
            replica.expect(marks, num_tokens)
        return Flight(replica, choice)


def num_tokens_of(marks: Marks, replicas: Iterable[Replica]) -> int:
    """Estimate the length of a prompt from the bytes per token that replicas report."""
    reports = [replica.report for replica in replicas if replica.report is not None]
    rates = [report.bytes_per_token for report in reports if report.bytes_per_token]
    return int(marks.num_bytes / (sum(rates) / len(rates) if rates else _BYTES_PER_TOKEN))


def _longest(digests: Sequence[bytes], known: Container[bytes]) -> int:
    """Return the index of the longest known mark of a prompt, or -1.

    Longer marks are forgotten before shorter ones of the same prompt, so binary search finds it.
    """
    if not digests or digests[0] not in known:
        return -1
    low, high = 1, len(digests)
    while low < high:
        middle = (low + high) // 2
        if digests[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low - 1
