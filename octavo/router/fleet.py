"""What a router knows of its replicas: what they told, and what it has sent them since.

For one event loop; nothing here blocks or waits.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from octavo.router.choice import Choice, Weights, choose
from octavo.router.marks import Marks
from octavo.router.report import MAX_REPORTED_MARKS, Report

# Prompts that were sent count as held for this long; afterwards only the replica's report counts.
_TRUST_S = 10.0
# A replica without a report for this long gets no requests.
_SILENCE_S = 5.0
_BYTES_PER_TOKEN = 4.0


class Replica:
    """One replica, as its router sees it.

    Attributes:
        name: where it is, for people.
        report: its latest, None while it is down.
        num_open: requests sent to it and not ended.
        last_chosen: number of the last choice that took it.
    """

    def __init__(self, name: str, weights: Weights, clock: Callable[[], float]) -> None:
        self.name = name
        self.report: Report | None = None
        self.num_open = self.last_chosen = 0
        self.open_prefill_tokens = 0
        self._weights = weights
        self._clock = clock
        self._heard_s = 0.0
        self._held: Mapping[bytes, int] = {}
        # By mark: its tokens, and when it was sent.
        self._sent: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests, as far as is known."""
        heard = self._clock() - self._heard_s < _SILENCE_S
        return heard and self.report is not None and self.report.state == "ready"

    @property
    def may_be_ready(self) -> bool:
        """Whether it has not said that it takes no requests, however long ago that was."""
        return self.report is None or self.report.state == "ready"

    @property
    def load_tokens(self) -> float:
        """Its load: prompts to compute, and requests under way, including those of other routers."""
        report = self.report
        told = 0 if report is None else report.num_running + report.num_waiting
        # They include requests of this router that have arrived.
        num_requests = told if told > self.num_open else self.num_open
        return self.open_prefill_tokens + self._weights.request_tokens * num_requests

    @property
    def free_tokens(self) -> float:
        """Room in its cache that nobody reads."""
        return 0.0 if self.report is None else self.report.free_tokens

    @property
    def num_marks(self) -> int:
        """Marks that it is known to hold."""
        return len(self._held) + len(self._sent)

    def saved_tokens(self, marks: Marks) -> int:
        """Return how many tokens of a prompt are in its cache, as far as is known."""
        digests, tokens = marks.digests, 0
        at = _longest(digests, self._held)
        if at >= 0:
            tokens = self._held[digests[at]]
        at = _longest(digests, self._sent)
        return tokens if at < 0 else max(tokens, self._sent[digests[at]][0])

    def hear(self, report: Report | None) -> None:
        """Take note of its report; None: it is down, and its cache is lost."""
        self.report, self._heard_s = report, self._clock()
        if report is None:
            self._held = {}
            self._sent.clear()
            return
        self._held = report.held()
        oldest = self._heard_s - _TRUST_S
        while self._sent and next(iter(self._sent.values()))[1] < oldest:
            self._sent.popitem(last=False)

    def expect(self, marks: Marks, num_tokens: int) -> None:
        """Count a prompt that is sent as held, until the replica reports what it holds."""
        now = self._clock()
        for digest, end in zip(reversed(marks.digests), reversed(marks.ends), strict=True):
            self._sent[digest] = (num_tokens * end // marks.num_bytes, now)
            self._sent.move_to_end(digest)
        while len(self._sent) > MAX_REPORTED_MARKS:
            self._sent.popitem(last=False)


class Flight:
    """A request that is under way to a replica and back.

    Attributes:
        replica: where it was sent.
        choice: why.
    """

    def __init__(self, replica: Replica, choice: Choice) -> None:
        self.replica = replica
        self.choice = choice
        self._prefill_tokens = choice.prefill_tokens
        self._is_open = True
        replica.num_open += 1
        replica.open_prefill_tokens += self._prefill_tokens

    def note_first_byte(self) -> None:
        """Note that its prompt is computed. Idempotent."""
        self.replica.open_prefill_tokens -= self._prefill_tokens
        self._prefill_tokens = 0

    def end(self) -> None:
        """Note that it has ended. Idempotent."""
        self.note_first_byte()
        self.replica.num_open -= self._is_open
        self._is_open = False


class Fleet:
    """All replicas.

    Attributes:
        replicas: in the order of their names.
    """

    def __init__(
        self, names: Sequence[str], weights: Weights = Weights(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.replicas = [Replica(name, weights, clock) for name in names]
        self._weights = weights
        self._num_choices = 0

    def send(self, marks: Marks, but: Container[str] = ()) -> Flight | None:
        """Choose a replica for a request and count it there; None if there is none.

        Args:
            marks: of its prompt.
            but: names of replicas to leave out.
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
    """Estimate how many tokens a prompt has, from what replicas have measured on others."""
    reports = [replica.report for replica in replicas if replica.report is not None]
    told = [report.bytes_per_token for report in reports if report.bytes_per_token]
    return int(marks.num_bytes / (sum(told) / len(told) if told else _BYTES_PER_TOKEN))


def _longest(digests: Sequence[bytes], known: Container[bytes]) -> int:
    """Return the index of the last of a prompt's marks that is known, or -1.

    A prompt's longer marks are forgotten before its shorter ones, so a search by halves finds it.
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
