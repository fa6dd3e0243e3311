"""An engine in a thread of its own, for callers on an asyncio event loop.

    event loop      submit ──► mail ─┐        ┌─► Stream: deltas, cut on demand
                    abort ──► aborts ┤        │
    engine's thread                  '► step ─┴─ ring ─► step ─ ring ...
    watchdog                             '── too long: stacks, every stream ends

Nothing here holds a lock during a step. Outputs are read beside their writer (outputs.DeltaReader); locks
guard queues and counts, for microseconds.

The engine handles an error within a step: it ends the requests of that step and goes on. If `Engine.step`
raises all the same, it is tried again, and the engine dies if that does not help. A step that passes its
deadline ends every stream, and the engine counts as dead; if the step returns, all its requests are aborted
and the engine lives again.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, TypeVar

from octavo.engine.engine import Engine
from octavo.engine.prompt_reader import Prompt, TokenIds
from octavo.errors import EngineDeadError, InvalidArgumentError, NotReadyError
from octavo.sampling_params import SamplingParams
from octavo.server.loop.jobs import Job, Jobs, WaitingRoom
from octavo.server.loop.output_stream import Readers, Stream
from octavo.server.loop.preparing import Preparing
from octavo.server.loop.stats import Histogram, LoopStats
from octavo.server.loop.worker import Worker

Found = TypeVar("Found")
State = Literal["loading", "ready", "draining", "dead"]

_POLL_S = 0.01
# After a drain's timeout: how long to wait until everything that was aborted is gone.
_ABORT_S = 5.0


class EngineLoop:
    """Runs an Engine in a thread of its own, for callers on an asyncio event loop."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        max_waiting: int = 1024,
        max_waiting_tokens: int = 1_000_000,
        step_deadline_s: float = 120.0,
    ) -> None:
        """Prepare; `start` begins to load.

        Args:
            make_engine: loads the engine; called in its thread.
            max_waiting: completions (each of n counts) that may wait for their first step.
            max_waiting_tokens: prompt tokens of them.
            step_deadline_s: seconds a step may take.

        Raises:
            InvalidArgumentError: a limit is not above 0.
        """
        _check_limits(max_waiting, max_waiting_tokens, step_deadline_s)
        self._jobs = Jobs(WaitingRoom(max_waiting, max_waiting_tokens))
        self._worker = Worker(make_engine, self._jobs, ring=self._ring, step_deadline_s=step_deadline_s)
        self._readers: dict[asyncio.AbstractEventLoop, Readers] = {}
        self._first_token_s, self._inter_token_s = Histogram(), Histogram()
        self._preparing = Preparing()
        self._is_draining = False

    def start(self) -> None:
        """Begin to load the engine. Once only."""
        self._worker.start()

    @property
    def engine(self) -> Engine:
        """The engine. Its tokenizer, model_config, plan and prompts may be read from any thread.

        Raises:
            NotReadyError: it is loading.
            EngineDeadError: it could not be loaded.
        """
        if not self._worker.is_loaded:
            raise NotReadyError("the model is loading; try again in a few seconds")
        if self._worker.engine_stats is None:
            raise EngineDeadError(f"the engine could not be loaded: {self.error!r}")
        return self._worker.engine

    @property
    def state(self) -> State:
        """Loading, ready, draining (no new requests are taken), or dead."""
        if self.error is not None:
            return "dead"
        if self._is_draining:
            return "draining"
        return "ready" if self._worker.is_loaded else "loading"

    @property
    def error(self) -> BaseException | None:
        """The error if the state is "dead", else None."""
        return self._worker.error

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the last step ended; 0 while the engine loads or has nothing to do."""
        return self._worker.seconds_since_progress

    @property
    def has_late_rank(self) -> bool:
        """Whether a rank of the engine does not answer. Steps wait for it until it does, or is given up."""
        return self.error is None and self._worker.is_loaded and self._worker.engine.late_rank is not None

    async def wait_until_ready(self) -> None:
        """Return once the engine is loaded.

        Raises:
            EngineDeadError: it could not be.
        """
        await asyncio.shield(asyncio.wrap_future(self._worker.loaded))
        self._check_alive()

    async def submit(
        self,
        prompt: Prompt | TokenIds,
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
        read_along: bool = True,
        prompt_logprobs_start: int | None = None,
        num_shared: int = 0,
    ) -> Stream:
        """Queue a request.

        Args:
            prompt: text, token ids, or what `engine.prompts` has read.
            params: how to continue it.
            request_id: unique among unfinished requests.
            cache_salt: requests share cached prefixes only with equal salts.
            priority: of requests that wait, lower numbers are admitted first.
            read_along: whether the tokens are read as they come.
            prompt_logprobs_start: as in Engine.add_request.
            num_shared: prompt tokens that another request counts, which has been submitted before.

        Raises:
            PromptError, SamplingParamsError, InvalidArgumentError: as Engine.add_request.
            ConfigError: the request asks for structured output, and llguidance is not installed.
            QueueFullError: too much waits.
            NotReadyError: the engine loads or drains.
            EngineDeadError: it is dead.
        """
        submitted_s = time.monotonic()
        self._check_ready()
        prompts = self.engine.prompts
        prompts.check_params(params)
        _check_arguments(request_id, cache_salt, priority)
        self._jobs.enter(params.n)
        try:
            token_ids = await self._preparing.read(prompts, prompt)
            text, grammar = prompts.text_of(prompt), await self._preparing.compile(self.engine, params)
            job = Job(
                request_id=request_id,
                prompt=text,
                token_ids=token_ids,
                params=params,
                cache_salt=cache_salt,
                priority=priority,
                read_along=read_along,
                submitted_s=submitted_s,
                grammar=grammar,
                prompt_logprobs_start=prompt_logprobs_start,
                num_shared=num_shared,
            )
            self._check_ready()
            self._jobs.add(job)
        except BaseException:
            self._jobs.leave(params.n)
            raise
        self._worker.post(job)
        return Stream(job, self._readers_here(), self._worker.abort)

    def check_room(self, num_completions: int) -> None:
        """Check that a request for so many completions could be queued now, before its prompt is read.

        Raises:
            QueueFullError: too much waits.
        """
        self._jobs.check_room(num_completions)

    async def call(self, act: Callable[[Engine], Found]) -> Found:
        """Call a short function in the engine's thread, between two steps, and return what it returns.

        Raises:
            NotReadyError: the engine loads.
            EngineDeadError: it is dead, or dies first.
        """
        engine = self.engine
        self._check_alive()
        answer: Future[Found] = Future()

        def run() -> None:
            try:
                answer.set_result(act(engine))
            except Exception as error:
                answer.set_exception(error)

        self._worker.post(run)
        while not answer.done():
            self._check_alive()
            await asyncio.sleep(_POLL_S)
        return answer.result()

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until those there are have ended; abort the rest at the timeout."""
        self._is_draining = True
        await self._wait_until_empty(timeout_s)
        for job in self._jobs.unfinished():
            self._worker.abort(job)
        await self._wait_until_empty(_ABORT_S)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the engine's thread; unfinished streams raise EngineDeadError. Idempotent; blocks for a step.

        A thread that does not end within the timeout is left behind.
        """
        self._is_draining = True
        self._worker.stop(timeout_s)
        self._preparing.stop()
        self._jobs.fail_all("the engine was stopped")
        self._ring()

    def stats(self) -> LoopStats:
        """Return what was counted so far: takes microseconds, waits for no step, and works in any state."""
        jobs, finished = self._jobs, self._worker.finished
        return LoopStats(
            engine=self._worker.engine_stats,
            num_waiting=jobs.num_waiting,
            num_waiting_tokens=jobs.num_waiting_tokens,
            num_live=jobs.num_live,
            num_rejected=jobs.num_rejected,
            num_finished=dict(finished.reasons),
            num_prompt_tokens=finished.num_prompt_tokens,
            num_cached_tokens=finished.num_cached_tokens,
            num_output_tokens=finished.num_output_tokens,
            num_leaked_blocks=self._worker.num_leaked_blocks,
            first_token_s=self._first_token_s.snapshot(),
            inter_token_s=self._inter_token_s.snapshot(),
            compile_s=self._preparing.compile_s.snapshot(),
            **finished.histograms(),
        )

    async def _wait_until_empty(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._jobs.num_live and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def _readers_here(self) -> Readers:
        event_loop = asyncio.get_running_loop()
        readers = self._readers.get(event_loop)
        if readers is None:
            readers = Readers(event_loop, self._first_token_s, self._inter_token_s)
            self._readers[event_loop] = readers
        return readers

    def _ring(self) -> None:
        """Wake all who wait for news: one call for each event loop."""
        for event_loop, readers in tuple(self._readers.items()):
            if not readers.ring():
                self._readers.pop(event_loop, None)

    def _check_alive(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"the engine is dead: {self.error!r}")

    def _check_ready(self) -> None:
        self._check_alive()
        if not self._worker.is_loaded:
            raise NotReadyError("the model is loading; try again in a few seconds")
        if self._is_draining:
            raise NotReadyError("the server is about to end and takes no new requests")


def _check_limits(max_waiting: int, max_waiting_tokens: int, step_deadline_s: float) -> None:
    limits = {
        "max_waiting": max_waiting,
        "max_waiting_tokens": max_waiting_tokens,
        "step_deadline_s": step_deadline_s,
    }
    for name, limit in limits.items():
        if not limit > 0:
            raise InvalidArgumentError(f"{name} must be above 0, got {limit}")


def _check_arguments(request_id: str, cache_salt: str, priority: int) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise InvalidArgumentError(f"request_id must be a string that is not empty, got {request_id!r}")
    if not isinstance(cache_salt, str):
        raise InvalidArgumentError(f'cache_salt must be a string, "" for none, got {cache_salt!r}')
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidArgumentError(f"priority must be an integer, got {priority!r}")
