"""The steps of an engine: each is scheduled and launched, and processed when the device has run it.

    schedule -> launch -> process -> RequestOutput
    scheduler   runner    output_processor

The three parts are separate, so that planning runs ahead of the device: where the runner allows it, the next
step is launched before the last one's tokens are known. A stop token is then found one step late; what its
sequence computed in the meantime is dropped.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from octavo.engine.output_processor import OutputProcessor
from octavo.engine.request import Request
from octavo.engine.sampling.sampler import SampledToken, not_finite
from octavo.engine.scheduler import Scheduler
from octavo.engine.step.pace import Pace, StepWork
from octavo.engine.step.pooled import Pooled
from octavo.engine.step.result import StepResult, StepRunner
from octavo.engine.step.scheduled import SchedulerOutput
from octavo.engine.torch_settings import without_default_device
from octavo.errors import EngineDeadError, EngineError, OctavoError
from octavo.garbage import StepGarbage, paused
from octavo.kv import KVCacheManager

logger = logging.getLogger(__name__)

# Estimates of a step's end may be far off, and a step noticed late would be learned as a long one.
_LONGEST_SLEEP_S = 1e-3


class _Launched(NamedTuple):
    """A step in flight.

    Attributes:
        step: what it does.
        wait: waits for its result.
        work: what step times are learned from; None: nobody reads along, so nothing is learned from it.
        launched_at: when, by time.perf_counter.
    """

    step: SchedulerOutput
    wait: Callable[[], StepResult]
    work: StepWork | None
    launched_at: float


class Steps:
    """Runs the steps of one engine, over its blocks, queues and outputs.

    Attributes:
        num_steps: steps that were processed.
        num_computed_tokens: tokens that they computed, recomputation included.
        num_output_tokens: tokens that they sampled.
    """

    def __init__(
        self,
        runner: StepRunner,
        manager: KVCacheManager,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        max_step_ms: float | None,
    ) -> None:
        """Begin without steps; max_step_ms: see EngineConfig."""
        self._runner = runner
        self._manager = manager
        self._scheduler = scheduler
        self._outputs = outputs
        # Steps launched whose results are not processed, oldest first.
        self._in_flight: deque[_Launched] = deque()
        self._pace = Pace(max_step_ms)
        self._garbage = StepGarbage()
        self.num_steps = self.num_computed_tokens = self.num_output_tokens = 0

    @without_default_device
    def run(self) -> None:
        """Launch the next step and process the one before. A request that fails fails alone."""
        begun_at = time.perf_counter()
        with paused():
            step = self._scheduler.schedule(self._pace.step_time)
            for request in step.finished:
                self.close(request)
            if step.scheduled:
                self._launch(step)
            self._pace.note_launch(time.perf_counter() - begun_at)
            self._garbage.collect()
            self._process_all_but(1 if step.scheduled and self._runner.runs_ahead else 0)

    @property
    def spare_s(self) -> float:
        """Seconds to sleep before asking again; 0: launch the next step; see Engine."""
        if len(self._in_flight) != 1 or self._runner.has_finished():
            return 0.0
        launched = self._in_flight[0]
        if launched.work is None:
            return 0.0
        return min(self._pace.spare_s(launched.work, launched.launched_at), _LONGEST_SLEEP_S)

    @without_default_device
    def close(self, request: Request) -> None:
        """End a request that was aborted or has failed."""
        self._retire(request)
        self._outputs.close(request)

    @without_default_device
    def start_over(self) -> None:
        """Make everything but the outputs anew. If this is interrupted, the next call begins again."""
        logger.info("a step was broken off: unfinished requests start over, the prefix cache is empty")
        self._in_flight.clear()
        try:
            self._runner.reset()
        except EngineDeadError:
            raise
        except Exception as error:
            raise EngineError(f"the device cannot start over, load the model again: {error!r}") from error
        self._manager.reset()
        unfinished = self._outputs.rewind()
        for request in unfinished:
            request.blocks = self._manager.new_sequence(request.blocks.salt)
        self._scheduler.reset(unfinished)

    def _launch(self, step: SchedulerOutput) -> None:
        launched_at = time.perf_counter()
        try:
            wait = self._runner.launch(step)
        except Exception as error:
            # Steps launched before it are not touched by its failure.
            self._process_all_but(0)
            self._fail_step(step, error)
            return
        self._scheduler.launch(step)
        work = step.work if step.is_read_along else None
        self._in_flight.append(_Launched(step, wait, work, launched_at))

    def _process_all_but(self, num_kept: int) -> None:
        """Wait for the steps in flight, oldest first, until `num_kept` are left."""
        while len(self._in_flight) > num_kept:
            step, wait, work, launched_at = self._in_flight.popleft()
            try:
                result = wait()
            except Exception as error:
                self._fail_step(step, error)
            else:
                self._pace.note_end(work, launched_at)
                self._process(step, result)

    def _process(self, step: SchedulerOutput, result: StepResult) -> None:
        self.num_steps += 1
        self.num_computed_tokens += step.num_tokens
        self.num_output_tokens += len(result.sampled)
        for chunk in result.prompt_logprobs:
            for offset, top in enumerate(chunk.tops.read()):
                chunk.request.prompt_logprobs[chunk.start + offset] = self._outputs.named(top)
        for item in step.scheduled:
            self._scheduler.commit(item)
        for part in result.pooled:
            if not part.request.is_finished:
                self._pool(part)
        for request, sampled in result.sampled.items():
            if not request.is_finished:
                self._accept(request, sampled)

    def _accept(self, request: Request, sampled: SampledToken) -> None:
        try:
            if sampled.error is not None:
                request.fail(sampled.error)
            else:
                request.append_output(sampled.token_id)
            if request.error is None:
                self._outputs.accept(request, sampled)
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            request.fail(EngineError(f"the output of this request could not be processed: {error!r}"))
        if request.error is not None:
            self.close(request)
        elif request.finish_reason is not None:
            self._retire(request)

    def _pool(self, part: Pooled) -> None:
        """Add a part of a pooled state, whose last one ends the request."""
        request, values = part.request, part.values.numpy()
        request.pooled = values if part.is_first or request.pooled is None else request.pooled + values
        if not part.is_last:
            return
        if request.pools_all:
            request.pooled = request.pooled / request.num_prompt_tokens
        request.finish("stop")
        if not np.isfinite(request.pooled).all():
            request.fail(not_finite("the pooled state is not finite"))
        self.close(request)

    def _fail_step(self, step: SchedulerOutput, error: Exception) -> None:
        """End a failed step's requests with an error; all others start over.

        Nothing that the step computed can be trusted, nor what steps launched after it may have read.
        """
        logger.error("a step with %d requests failed", len(step.scheduled), exc_info=error)
        if isinstance(error, OctavoError):
            failure = error
        else:
            failure = EngineError(f"the model step failed: {error!r}")
            # Its frames hold the step's tensors, so they are dropped.
            failure.__cause__ = error.with_traceback(None)
        for item in step.scheduled:
            if not item.request.is_finished:
                item.request.fail(failure)
                self.close(item.request)
        self.start_over()

    def _retire(self, request: Request) -> None:
        if not request.is_finished:
            self._scheduler.finish(request)
        self._runner.release(request)
