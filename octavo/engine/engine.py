"""The engine: requests in, outputs that grow, one step at a time.

    add_request -> [ schedule -> launch -> process ] -> RequestOutput
                     scheduler   runner    output_processor

The three parts of a step are separate, so that planning runs ahead of the device: where the runner allows it,
the next step is launched before the last one's tokens are known. A stop token is then found one step late;
what its sequence computed in the meantime is dropped.

Ctrl-C, a signal handler or a lack of memory may end a step between any two of its instructions. So the
outputs are the truth, and everything else can be made from them again:

    in doubt = True      blocks, queues, device rows change; a token counts once it is in its output
    in doubt = False     only when all of that is done

Whoever comes next and finds the engine in doubt starts it over: every block is free, no prefix is cached, and
each unfinished request computes the tokens of its output again. Nothing that a broken step left is ever read.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.engine.loading import make_runner, read_decoder
from octavo.engine.memory import ExecutionPlan, gib, plan_execution
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.pace import Pace
from octavo.engine.prompts import Prompt, PromptReader, TokenIds
from octavo.engine.ranks import LeaderRunner, start_ranks
from octavo.engine.request import Request
from octavo.engine.request_maker import RequestMaker
from octavo.engine.sampling.sampler import SampledToken
from octavo.engine.scheduler import Scheduler, SchedulerOutput
from octavo.engine.stats import EngineStats
from octavo.engine.step_result import PrepareProgress, StepResult, StepRunner
from octavo.engine.step_time import StepWork
from octavo.engine.structured import Grammar, Grammars
from octavo.errors import ConfigError, EngineDeadError, EngineError, InvalidArgumentError, OctavoError
from octavo.garbage import StepGarbage, freeze
from octavo.kv import KVCacheManager
from octavo.models import (
    Decoder,
    ModelConfig,
    ModelSource,
    bytes_in_blocks,
    load_tokenizer,
    read_config,
    resolve_model,
)
from octavo.outputs import RequestOutput
from octavo.parallel import TensorParallel
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Every way to a token: forks, log-probabilities, filters, and changes of logits.
_REHEARSAL = SamplingParams(
    n=2,
    max_tokens=4,
    min_tokens=2,
    temperature=0.5,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    logprobs=1,
    prompt_logprobs=1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    stop_token_ids=[0],
    detokenize=False,
)
_REHEARSAL_TOKENS = 8


class _Launched(NamedTuple):
    """A step under way.

    Attributes:
        step: what it does.
        wait: waits for its result.
        work: what is learned from it; None: nobody reads along, and it is no example for steps that matter.
        launched_at: when, by time.perf_counter.
    """

    step: SchedulerOutput
    wait: Callable[[], StepResult]
    work: StepWork | None
    launched_at: float


class Engine:
    """One model on one device, with its tokenizer, KV cache and scheduler. For one thread at a time.

    Attributes:
        config: the options it was built with.
        plan: every "auto" decided: device, dtype, lengths, KV cache size.
        model_config: the network.
        tokenizer: None for models without one (token ids only).
        prompts: reads prompts; any thread may use it.
        grammars: compiles what structured outputs must be; any thread may use it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        decoder: Decoder | None = None,
        parallel: TensorParallel = TensorParallel(),
        progress: PrepareProgress | None = None,
    ) -> None:
        """Load the model and allocate the KV cache.

        Args:
            config: engine options.
            decoder: weights already loaded for this model and rank, to be shared with another engine.
            parallel: the rank this engine is, where somebody else runs an engine for each rank: all must get
                the same calls in the same order. For config.tensor_parallel_size > 1 the engine starts the
                other ranks itself.
            progress: called with (what is done, how many are done, how many there are) until the engine is
                ready.

        Raises:
            ModelError: the model cannot be found, read or supported.
            ConfigError: options contradict the model, the machine or the ranks.
            OutOfMemoryError: weights or KV cache do not fit.
            EngineDeadError: another rank ended while it loaded.
        """
        self._ranks: LeaderRunner | None = None
        if config.tensor_parallel_size > 1:
            if decoder is not None or parallel.size > 1:
                raise ConfigError("with tensor_parallel_size > 1 an engine makes all ranks' decoders itself")
            parallel = TensorParallel.not_met(0, config.tensor_parallel_size)
        source = resolve_model(config.model, config.load_format)
        self.config = config
        self.model_config = ModelConfig.from_hf(read_config(source))
        blocks = bytes_in_blocks(source, config.load_format)
        self.plan = plan_execution(config, self.model_config, parallel, blocks=blocks)
        self.tokenizer = load_tokenizer(source)
        try:
            self.runner = self._load(source, decoder, progress)
            self._get_ready(progress)
        except BaseException:
            self.close()
            raise

    def _load(
        self, source: ModelSource, decoder: Decoder | None, progress: PrepareProgress | None
    ) -> StepRunner:
        """Load the weights and allocate the KV cache, on all ranks."""
        config, model = self.config, self.model_config
        loaded = None if progress is None else partial(progress, "loading weights")
        if config.tensor_parallel_size > 1:
            self._ranks = start_ranks(config, self.plan, source, model, loaded)
            self.plan = self._ranks.plan
        _log_plan(self.plan, source)
        if self._ranks is not None:
            return self._ranks
        return make_runner(
            decoder or read_decoder(source, config, self.plan, model, loaded), config, self.plan
        )

    def _get_ready(self, progress: PrepareProgress | None) -> None:
        """Make everything else, and do what requests would have to wait for."""
        config, plan = self.config, self.plan
        self.prompts = PromptReader(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_model_len=plan.max_model_len,
            num_kv_tokens=plan.num_kv_tokens,
        )
        self._eos_token_ids = self.model_config.eos_token_ids
        if self.tokenizer is not None:
            self._eos_token_ids |= self.tokenizer.eos_token_ids
        self.grammars = Grammars(
            self.tokenizer, vocab_size=self.model_config.vocab_size, eos_token_ids=self._eos_token_ids
        )
        self._open_books()
        if config.prepare and self.runner.runs_ahead:
            self.runner.prepare(progress or _ignore)
            self._rehearse()
            freeze()
        self.runner.note_ready()

    def _open_books(self) -> None:
        """Make what keeps account of requests and blocks, all of it empty."""
        config, plan = self.config, self.plan
        self.manager = KVCacheManager(
            plan.num_blocks,
            plan.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            bytes_per_block=plan.block_size * plan.kv_bytes_per_token,
        )
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
        )
        self.outputs = OutputProcessor(self.tokenizer)
        # Steps launched whose results are not processed, oldest first.
        self._in_flight: deque[_Launched] = deque()
        self._pace = Pace(config.max_step_ms)
        self._garbage = StepGarbage()
        self._in_doubt = False
        self._maker = RequestMaker(
            seed=config.seed, max_model_len=plan.max_model_len, eos_token_ids=self._eos_token_ids
        )
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_output_tokens = 0

    def _rehearse(self) -> None:
        """Answer a request that asks for everything, then forget it: what is set up on first use then is."""
        if min(self.plan.max_model_len, self.plan.num_kv_tokens) < _REHEARSAL_TOKENS:
            return
        self.add_request([0, 0, 0], _REHEARSAL)
        while self.has_unfinished_requests:
            self.step()
        self.runner.reset()
        self._open_books()

    @property
    def error(self) -> OctavoError | None:
        """Why the engine will never run again, because a rank of it has ended; else None."""
        return None if self._ranks is None else self._ranks.error

    def when_dead(self, mourn: Callable[[OctavoError], None]) -> None:
        """Have a function called, at once and in another thread, if a rank of the engine ends."""
        if self._ranks is not None:
            self._ranks.when_dead(mourn)

    def close(self) -> None:
        """End other ranks: nothing runs any more. An engine that is dropped does the same. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that users wait for, each with all its completions."""
        return len(self.outputs)

    def add_request(
        self,
        prompt: Prompt | TokenIds,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        prompt_logprobs_start: int | None = None,
        read_along: bool = True,
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> RequestOutput:
        """Queue one request.

        Args:
            prompt: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or what `prompts` has read.
            params: how to continue it.
            request_id: unique among unfinished requests; default: as `new_request_id` gives.
            cache_salt: requests share cached prefixes only with equal salts.
            prompt_logprobs_start: first prompt position whose log-probability is wanted; default 1 when
                params.prompt_logprobs is set. Tokens before it may come from the prefix cache.
            read_along: somebody reads the tokens as they come: EngineConfig.max_step_ms holds while it runs.
            priority: of requests that wait, those with a lower number are admitted first, and among equals
                the one that came first.
            grammar: params.structured as `grammars` compiled it, so that no step waits for that; None: it is
                compiled here.

        Returns:
            The output, which steps add to until it is `finished`.

        Raises:
            PromptError: the prompt is empty, malformed or holds ids outside the vocabulary.
            RequestTooLongError: it can never fit the model's context or the KV cache.
            SamplingParamsError: a parameter does not fit this model; StructuredOutputError: the grammar.
            ConfigError: params.structured needs a package that is not installed.
            InvalidArgumentError: a request with this id is still running, or the salt is no string.
        """
        token_ids = self.prompts.read(prompt)
        self.prompts.check_params(params)
        salt = _salt_bytes(cache_salt)
        if grammar is None:
            grammar = self.grammars.of(params)
        request_id = self._maker.checked_id(request_id, self.outputs)
        self._begin()
        requests = self._maker.make(
            request_id,
            token_ids.packed,
            params,
            lambda: self.manager.new_sequence(salt),
            prompt_logprobs_start=prompt_logprobs_start,
            read_along=read_along,
            priority=priority,
            grammar=grammar,
        )
        output = self.outputs.add(requests, self.prompts.text_of(prompt), token_ids.listed)
        self.scheduler.add(requests[0])
        self._in_doubt = False
        return output

    def new_request_id(self) -> str:
        """Return a running number that is no unfinished request's id."""
        return self._maker.new_id(self.outputs)

    def abort(self, request_id: str) -> None:
        """End a request in any state and free its blocks; unknown or finished ids are ignored.

        Raises:
            InvalidArgumentError: the id is no string.
        """
        if not isinstance(request_id, str):
            raise InvalidArgumentError(f"request_id must be a string, got {request_id!r}")
        self._begin()
        if request_id in self.outputs:
            for request in self.outputs.requests(request_id):
                if not request.is_finished:
                    request.finish("abort")
                    self._close(request)
        self._in_doubt = False

    def step(self) -> None:
        """Launch the next step and process the one before. A request that fails fails alone."""
        self._begin()
        begun_at = time.perf_counter()
        with self._garbage.paused():
            step = self.scheduler.schedule(self._pace.limit)
            for request in step.finished:
                self._close(request)
            if step.scheduled:
                self._launch(step)
            self._pace.note_launch(time.perf_counter() - begun_at)
            self._garbage.collect()
            self._process_all_but(1 if step.scheduled and self.runner.runs_ahead else 0)
        self._in_doubt = False

    @property
    def spare_s(self) -> float:
        """Seconds until the next step should be launched: the device is busy, and requests that are added
        until then join that step. 0: now. See pace.py.
        """
        if len(self._in_flight) != 1 or self._in_doubt:
            return 0.0
        launched = self._in_flight[0]
        return 0.0 if launched.work is None else self._pace.spare_s(launched.work, launched.launched_at)

    def settle(self) -> None:
        """Start over if the last call was broken off; see this file's first lines.

        Raises:
            EngineError: the device or the machine lets nothing start; the next call tries again.
        """
        if self._in_doubt:
            self._start_over()
            self._in_doubt = False

    def reset_prefix_cache(self) -> int:
        """Drop all cached blocks no request uses; returns how many."""
        self._begin()
        num_dropped = self.manager.reset_prefix_cache()
        self._in_doubt = False
        return num_dropped

    @property
    def num_computed_tokens(self) -> int:
        """Tokens the model has computed, recomputation included."""
        return self._num_computed_tokens

    def stats(self) -> EngineStats:
        """A snapshot of counters and of the block pool."""
        self.settle()
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            late_work=self.runner.late_work(),
            sharing=self.runner.sharing(),
            kv=self.manager.stats(),
        )

    def _begin(self) -> None:
        """Note that a change is under way. The caller sets `_in_doubt` to False when all of it is done."""
        self.settle()
        self._in_doubt = True

    def _start_over(self) -> None:
        """Make everything but the outputs anew. If this is broken off, the next call begins it again."""
        logger.info("a step was broken off: unfinished requests start over, the prefix cache is empty")
        self._in_flight.clear()
        try:
            self.runner.reset()
        except EngineDeadError:
            raise
        except Exception as error:
            raise EngineError(f"the device cannot start over, load the model again: {error!r}") from error
        self.manager.reset()
        unfinished = self.outputs.rewind()
        for request in unfinished:
            request.blocks = self.manager.new_sequence(request.blocks.salt)
        self.scheduler.reset(unfinished)

    def _launch(self, step: SchedulerOutput) -> None:
        launched_at = time.perf_counter()
        try:
            wait = self.runner.launch(step)
        except Exception as error:
            # Steps launched before it are not touched by its failure.
            self._process_all_but(0)
            self._fail_step(step, error)
            return
        self.scheduler.launch(step)
        work = step.work if step.is_read_along else None
        self._in_flight.append(_Launched(step, wait, work, launched_at))

    def _process_all_but(self, num_kept: int) -> None:
        """Wait for the steps under way, oldest first, until `num_kept` are left."""
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
        self._num_steps += 1
        self._num_computed_tokens += step.num_tokens
        self._num_output_tokens += len(result.sampled)
        for chunk in result.prompt_logprobs:
            for offset, top in enumerate(chunk.tops):
                chunk.request.prompt_logprobs[chunk.start + offset] = self.outputs.named(top)
        for item in step.scheduled:
            self.scheduler.commit(item)
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
                self.outputs.accept(request, sampled)
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            request.fail(EngineError(f"the output of this request could not be processed: {error!r}"))
        if request.error is not None:
            self._close(request)
        elif request.finish_reason is not None:
            self._retire(request)

    def _fail_step(self, step: SchedulerOutput, error: Exception) -> None:
        """End a failed step's requests with an error; all others start over.

        Nothing that the step computed can be trusted, nor what steps launched after it may have read.
        """
        logger.error("a step with %d requests failed", len(step.scheduled), exc_info=error)
        failure = (
            error if isinstance(error, OctavoError) else EngineError(f"the model step failed: {error!r}")
        )
        for item in step.scheduled:
            if not item.request.is_finished:
                item.request.fail(failure)
                self._close(item.request)
        self._start_over()

    def _close(self, request: Request) -> None:
        self._retire(request)
        self.outputs.close(request)

    def _retire(self, request: Request) -> None:
        if not request.is_finished:
            self.scheduler.finish(request)
        self.runner.release(request)


def _ignore(what: str, done: int, total: int) -> None:
    """Nobody watches."""


def _log_plan(plan: ExecutionPlan, source: ModelSource) -> None:
    logger.info(
        "%s on %s, rank %d of %d: weights %s, KV cache %s (%d tokens), activations %s of %s free",
        source.path,
        plan.device,
        plan.parallel.rank,
        plan.parallel.size,
        gib(plan.weight_bytes),
        gib(plan.kv_bytes),
        plan.num_kv_tokens,
        gib(plan.working_bytes),
        gib(plan.free_bytes),
    )


def _salt_bytes(cache_salt: str) -> bytes:
    if not isinstance(cache_salt, str):
        raise InvalidArgumentError(f'cache_salt must be a string, "" for none, got {cache_salt!r}')
    return cache_salt.encode("utf-8", "surrogatepass")
