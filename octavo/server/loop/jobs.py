"""The unfinished requests of a loop: which there are, how many may wait, and which will not be finished."""

import threading
import time
from collections import deque
from dataclasses import dataclass

from octavo.engine.prompt_reader import TokenIds
from octavo.engine.structured.matcher import Grammar
from octavo.errors import EngineDeadError, InvalidArgumentError, OctavoError, QueueFullError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

# How fast requests begin is estimated from the last ones: at most this many, of the last so many seconds.
_NUM_BEGINNINGS = 256
_MEMORY_S = 60.0
# Bounds of Retry-After, and its value before any request has begun, in seconds.
_LEAST_S, _MOST_S, _UNKNOWN_S = 1.0, 60.0, 5.0


class WaitingRoom:
    """Counts completions and prompt tokens that wait. Its owner must hold a lock.

    An empty room takes anything, so that every request can run at some time.

    Attributes:
        num_waiting: completions, each of a request's n.
        num_tokens: prompt tokens.
        num_rejected: requests that were refused.
    """

    def __init__(self, max_waiting: int, max_tokens: int) -> None:
        self._max_waiting = max_waiting
        self._max_tokens = max_tokens
        self.num_waiting = self.num_tokens = self.num_rejected = 0
        self._beginnings: deque[tuple[float, int]] = deque(maxlen=_NUM_BEGINNINGS)

    def enter(self, num_completions: int) -> None:
        """Let a request in before its prompt is read.

        Raises:
            QueueFullError: too many wait.
        """
        self.check(num_completions)
        self.num_waiting += num_completions

    def check(self, num_completions: int) -> None:
        """Check that `enter` would let a request in.

        Raises:
            QueueFullError: too many wait.
        """
        if self.num_waiting and self.num_waiting + num_completions > self._max_waiting:
            raise self._full(f"{self.num_waiting} completions wait, at most {self._max_waiting} may")

    def add_tokens(self, num_tokens: int) -> None:
        """Note the length of the prompt of a request that was let in.

        Raises:
            QueueFullError: too many tokens wait; the request has to leave.
        """
        if self.num_tokens and self.num_tokens + num_tokens > self._max_tokens:
            raise self._full(f"{self.num_tokens} prompt tokens wait, at most {self._max_tokens} may")
        self.num_tokens += num_tokens

    def leave(self, num_completions: int, num_tokens: int, *, begins: bool) -> None:
        """Let a request out, because it `begins`, or because it ended before it began."""
        self.num_waiting -= num_completions
        self.num_tokens -= num_tokens
        if begins:
            self._beginnings.append((time.monotonic(), num_completions))

    def retry_after_s(self) -> float:
        """Return the seconds until all that wait have begun, if they begin as fast as others did lately."""
        now = time.monotonic()
        recent = [(then, count) for then, count in self._beginnings if now - then < _MEMORY_S]
        if not recent:
            return _UNKNOWN_S
        per_s = sum(count for _, count in recent) / max(now - recent[0][0], _LEAST_S)
        return min(max(self.num_waiting / per_s, _LEAST_S), _MOST_S)

    def _full(self, what: str) -> QueueFullError:
        self.num_rejected += 1
        seconds = self.retry_after_s()
        return QueueFullError(f"the queue is full: {what}; come back in {seconds:.0f} s", seconds)


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the loop.

    Attributes:
        request_id, params, cache_salt, priority, read_along, prompt_logprobs_start: as in EngineLoop.submit.
        prompt: its text, None when token ids were given.
        token_ids: checked.
        submitted_s: when it came, by time.monotonic.
        num_shared: prompt tokens that another job counts.
        grammar: of params.structured, compiled.
        output: what the engine writes; None until the engine has the request.
        failure: why the output will not be finished, else None.
        is_aborted: nobody needs it any more.
    """

    request_id: str
    prompt: str | None
    token_ids: TokenIds
    params: SamplingParams
    cache_salt: str
    priority: int
    read_along: bool
    submitted_s: float
    grammar: Grammar | None = None
    prompt_logprobs_start: int | None = None
    num_shared: int = 0
    output: RequestOutput | None = None
    failure: OctavoError | None = None
    is_aborted: bool = False

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that count while it waits."""
        return len(self.token_ids.listed) - self.num_shared

    @property
    def has_begun(self) -> bool:
        """Whether its first token was scheduled, or it has ended."""
        output = self.output
        return output is not None and (output.metrics.first_scheduled_s is not None or output.finished)

    @property
    def has_ended(self) -> bool:
        return self.failure is not None or (self.output is not None and self.output.finished)


class Jobs:
    """The unfinished jobs, for any thread. Its lock is held for microseconds."""

    def __init__(self, room: WaitingRoom) -> None:
        self._lock = threading.Lock()
        self._room = room
        self._live: dict[str, Job] = {}
        self._waiting: dict[str, Job] = {}
        # Why no job can be added, for callers; else None.
        self._closed: str | None = None

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Completions that wait, including those whose prompts are being read."""
        return self._room.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self._room.num_tokens

    @property
    def num_rejected(self) -> int:
        return self._room.num_rejected

    def unfinished(self) -> list[Job]:
        """Return all unfinished jobs."""
        with self._lock:
            return [*self._live.values()]

    def enter(self, num_completions: int) -> None:
        """Take a place for a request whose prompt is to be read.

        Raises:
            QueueFullError: too many wait.
        """
        with self._lock:
            self._room.enter(num_completions)

    def check_room(self, num_completions: int) -> None:
        """Check that a request could enter now.

        Raises:
            QueueFullError: too many wait.
        """
        with self._lock:
            self._room.check(num_completions)

    def leave(self, num_completions: int) -> None:
        """Give back a place that no job will use."""
        with self._lock:
            self._room.leave(num_completions, 0, begins=False)

    def add(self, job: Job) -> None:
        """Add a job that has a place.

        Raises:
            EngineDeadError: all jobs have failed, and none can be added.
            InvalidArgumentError: its id is an unfinished request's.
            QueueFullError: too many tokens wait.
        """
        with self._lock:
            if self._closed is not None:
                raise EngineDeadError(self._closed)
            if job.request_id in self._live:
                raise InvalidArgumentError(
                    f"request_id must be unique among unfinished requests, {job.request_id!r} still runs"
                )
            self._room.add_tokens(job.num_queued_tokens)
            self._live[job.request_id] = self._waiting[job.request_id] = job

    def note_begun(self) -> None:
        """Stop counting jobs as waiting that have begun. Call it after each step."""
        if not self._waiting:
            return
        with self._lock:
            for job in [job for job in self._waiting.values() if job.has_begun]:
                self._stop_waiting(job, begins=True)

    def remove(self, job: Job) -> None:
        """Forget a job that has ended."""
        with self._lock:
            if self._live.get(job.request_id) is job:
                del self._live[job.request_id]
                self._stop_waiting(job, begins=False)

    def fail_all(self, reason: str) -> None:
        """End all jobs with an EngineDeadError, and refuse new ones until `reopen`."""
        with self._lock:
            self._closed = reason
            for job in self._live.values():
                if not job.has_ended:
                    job.failure = EngineDeadError(reason)
                self._stop_waiting(job, begins=False)
            self._live.clear()

    def reopen(self) -> None:
        """Take jobs again."""
        with self._lock:
            self._closed = None

    def _stop_waiting(self, job: Job, *, begins: bool) -> None:
        if self._waiting.pop(job.request_id, None) is not None:
            self._room.leave(job.params.n, job.num_queued_tokens, begins=begins)
