"""The engine's thread: steps while there is work, sleeps when there is none, and survives what it can."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from octavo.engine.engine import Engine
from octavo.engine.engine_stats import EngineStats
from octavo.errors import EngineDeadError, EngineError, OctavoError
from octavo.garbage import freeze
from octavo.server.loop.jobs import Job, Jobs
from octavo.server.loop.stats import Finished
from octavo.server.loop.watchdog import Watchdog

logger = logging.getLogger(__name__)

# While there is work, new requests are taken for at most this long before the next step.
_TAKE_S = 5e-3
_STATS_EVERY_S = 0.1
# Errors that steps raise are forgotten after this many good steps; more than this many end the engine.
_FORGIVEN_AFTER, _MAX_FAILURES = 100, 2


class Worker:
    """Owns an engine and the thread it runs in.

        turn = sleep until there is work -> take mail and aborts -> step -> note what began and ended -> ring
               -> wait as long as the engine can spare, taking mail

    Attributes:
        engine: the engine, once `loaded` is done without an error.
        loaded: done when the engine is ready, or will never be.
        is_loaded: the same, without the lock that a future takes.
        error: why the engine is dead, else None.
        finished: what is counted of requests that ended.
        engine_stats: the engine's counters as of at most 0.1 s ago.
        num_leaked_blocks: blocks of the KV cache that were held when no request was left.
    """

    engine: Engine

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        jobs: Jobs,
        *,
        ring: Callable[[], None],
        step_deadline_s: float,
    ) -> None:
        """Make the thread; `start` begins to load.

        Args:
            make_engine: loads the engine; called in the thread.
            jobs: the unfinished ones.
            ring: tells readers that outputs have changed.
            step_deadline_s: seconds a step may take.
        """
        self.loaded: Future[None] = Future()
        self.is_loaded = False
        self.error: BaseException | None = None
        self.finished = Finished()
        self.engine_stats: EngineStats | None = None
        self.num_leaked_blocks = 0
        self._make_engine = make_engine
        self._jobs = jobs
        self._ring = ring
        # Wakes the thread; what it waits for is in queues that need no lock.
        self._news = threading.Condition()
        self._mail: deque[Job | Callable[[], None]] = deque()
        self._aborts: deque[Job] = deque()
        # The jobs that the engine has; only this thread uses it.
        self._active: dict[str, Job] = {}
        self._is_stopped = self._is_idle = False
        self._progress_s = self._counted_s = time.monotonic()
        self._num_failures = self._num_good_steps = 0
        self._watchdog = Watchdog(step_deadline_s, self._overrun)
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._watchdog.start()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the current step; leave it behind if that takes longer than the timeout."""
        self._is_stopped = True
        self._notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._watchdog.stop()

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the last turn ended; 0 while the engine loads or has nothing to do."""
        return 0.0 if self._is_idle or not self.is_loaded else time.monotonic() - self._progress_s

    def post(self, item: Job | Callable[[], None]) -> None:
        """Hand over a job to run, or a function to call between two steps."""
        self._mail.append(item)
        self._notify()

    def abort(self, job: Job) -> None:
        """Ask for a job's end. Takes no lock: a caller that drops a stream may hold any lock."""
        # While the engine has the job, or the mail, the thread does not sleep.
        job.is_aborted = True
        self._aborts.append(job)

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()

    def _run(self) -> None:
        try:
            self.engine = self._make_engine()
            self.engine.when_dead(self._die)
            freeze()
            self.engine_stats = self.engine.stats()
            self._progress_s = time.monotonic()
            self._note_loaded()
            while not self._is_stopped:
                self._turn()
        except BaseException as error:
            # The caller that starts the server reports why there is no engine.
            if self.is_loaded or not isinstance(error, OctavoError):
                logger.critical("the engine is dead", exc_info=error)
            self._die(error)
        finally:
            self._watchdog.stop()
            if self.is_loaded:
                self.engine.close()
            else:
                self._note_loaded()
            self._ring()

    def _note_loaded(self) -> None:
        self.is_loaded = True
        self.loaded.set_result(None)

    def _turn(self) -> None:
        self._sleep_until_work()
        if self.engine.error is not None:
            raise self.engine.error
        if self.error is not None:
            self._revive()
        self._attempt(self._step)
        self._progress_s = time.monotonic()
        self._ring()
        while self.error is None and not self._is_stopped and (spare_s := self.engine.spare_s) > 0:
            self._wait(spare_s)
            self._attempt(self._take)

    def _sleep_until_work(self) -> None:
        if self._active:
            return
        while not (self._mail or self._is_stopped or self.error is not None):
            self._is_idle = True
            self._wait(None)
        self._progress_s = time.monotonic()
        self._is_idle = False

    def _wait(self, seconds: float | None) -> None:
        """Wait for mail."""
        with self._news:
            if not (self._mail or self._is_stopped or self.error is not None):
                self._news.wait(seconds)

    def _take(self) -> None:
        """Pass new jobs to the engine, and abort those that nobody needs."""
        until = time.monotonic() + _TAKE_S
        while self._mail and (not self._active or time.monotonic() < until):
            item = self._mail.popleft()
            if isinstance(item, Job):
                self._submit(item)
            else:
                item()
        while self._aborts:
            job = self._aborts[0]
            if self._active.get(job.request_id) is job:
                self.engine.abort(job.request_id)
            self._aborts.popleft()

    def _submit(self, job: Job) -> None:
        if job.failure is not None:
            return
        try:
            output = self.engine.add_request(
                job.token_ids,
                job.params,
                request_id=job.request_id,
                cache_salt=job.cache_salt,
                prompt_logprobs_start=job.prompt_logprobs_start,
                read_along=job.read_along,
                priority=job.priority,
                grammar=job.grammar,
            )
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("request %s could not be added", job.request_id)
                error = EngineError(f"the request could not be added: {error!r}")
            job.failure = error
            self._jobs.remove(job)
            # The engine may have added it halfway.
            self.engine.abort(job.request_id)
            return
        output.prompt, output.metrics.arrival_s = job.prompt, job.submitted_s
        self._active[job.request_id] = job
        job.output = output
        if job.is_aborted:
            self.engine.abort(job.request_id)

    def _step(self) -> None:
        self._take()
        if self.engine.has_unfinished_requests:
            before = self.engine.num_computed_tokens
            self.engine.step()
            if self.engine.num_computed_tokens > before:
                self.finished.step_tokens.observe(self.engine.num_computed_tokens - before)
        self._note_ended()
        self._note_stats()

    def _attempt(self, act: Callable[[], None]) -> None:
        """Use the engine under the watchdog. After an error it starts over; after too many, raise."""
        self._watchdog.begin()
        try:
            act()
        except Exception as error:
            self._num_failures += 1
            self._num_good_steps = 0
            if self._num_failures > _MAX_FAILURES:
                raise
            logger.exception("a step was broken off, its requests start over: %r", error)
        else:
            self._num_good_steps += 1
            if self._num_good_steps >= _FORGIVEN_AFTER:
                self._num_failures = 0
        finally:
            self._watchdog.end()

    def _note_ended(self) -> None:
        self._jobs.note_begun()
        if self.engine.num_unfinished_requests == len(self._active):
            if self._active and not self.engine.has_unfinished_requests:
                raise EngineError("the engine has nothing to do, and somebody still waits")
            return
        for job in [job for job in self._active.values() if job.has_ended]:
            del self._active[job.request_id]
            self._jobs.remove(job)
            if job.failure is None and job.output is not None:
                self.finished.count(job.output)

    def _note_stats(self) -> None:
        now = time.monotonic()
        if not self._active or now - self._counted_s >= _STATS_EVERY_S:
            self._counted_s = now
            self.engine_stats = self.engine.stats()
            if not self.engine.has_unfinished_requests:
                self._note_leak(self.engine_stats.kv.num_referenced)

    def _note_leak(self, num_blocks: int) -> None:
        """Note blocks that nobody will ever free; the log tells when there are more of them."""
        if num_blocks > self.num_leaked_blocks:
            logger.error("blocks of the KV cache are held although no request is left: %d", num_blocks)
        self.num_leaked_blocks = num_blocks

    def _die(self, error: BaseException) -> None:
        """End for good. Called by this thread, or by another one if a rank of the engine is gone."""
        self.error = error
        self._jobs.fail_all(f"the engine is dead: {error!r}")
        self._notify()
        self._ring()

    def _overrun(self, seconds: float) -> None:
        """Count as dead: called by the watchdog while this thread hangs in a step."""
        reason = f"a step of the engine has run for {seconds:.1f} s"
        # The order matters: a step that comes back just now reopens what was closed.
        self._jobs.fail_all(reason)
        self.error = EngineDeadError(reason)
        self._notify()
        self._ring()

    def _revive(self) -> None:
        """Go on after a step that had passed its deadline returned; its requests have failed."""
        logger.warning("the step came back after its deadline; its requests are aborted, the engine goes on")
        for job in self._active.values():
            self.engine.abort(job.request_id)
        self._active.clear()
        self.error = None
        self._jobs.reopen()
