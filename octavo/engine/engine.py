"""The engine: requests in, outputs that grow, one step at a time (step/steps.py).

Ctrl-C, a signal handler or a lack of memory may end a step between any two of its instructions. So the
outputs are the truth, and everything else can be made from them again:

    in doubt = True      blocks, queues, device rows change; a token counts once it is in its output
    in doubt = False     only when all of that is done

An `Exception` that a signal handler raises in a step cannot be told from an error of that step: its
requests fail with an EngineError, whose cause it is. One that derives only from BaseException, as
KeyboardInterrupt does, ends the call that it interrupts, and nothing else.

The next call that finds the engine in doubt starts it over: every block is free, no prefix is cached, and
each unfinished request computes the tokens of its output again. Nothing that a broken step left is ever read.
"""

from collections.abc import Callable
from functools import partial

from octavo.config import EngineConfig
from octavo.engine.engine_stats import EngineStats
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.prompt_reader import POOLED, Prompt, PromptReader, TokenIds
from octavo.engine.ranks import LeaderRunner, start_ranks
from octavo.engine.request_maker import REHEARSAL, REHEARSAL_TOKENS, RequestMaker, salt_bytes
from octavo.engine.runner_setup import log_plan, make_runner, plan_model, read_decoder
from octavo.engine.scheduler import Scheduler
from octavo.engine.step.result import PrepareProgress, StepRunner
from octavo.engine.step.steps import Steps
from octavo.engine.structured import Grammar, Grammars
from octavo.engine.torch_settings import without_default_device
from octavo.errors import ConfigError, InvalidArgumentError, OctavoError
from octavo.garbage import freeze
from octavo.kv import KVCacheManager
from octavo.models import Decoder, ModelSource, load_tokenizer, read_sampling_defaults
from octavo.outputs import RequestOutput
from octavo.parallel import TensorParallel
from octavo.sampling_params import SamplingParams


class Engine:
    """One model on one device, with its tokenizer, KV cache and scheduler. For one thread at a time.

    Attributes:
        config: the options it was built with.
        plan: config with every "auto" decided: device, dtype, lengths, KV cache size.
        model_config: the network.
        tokenizer: None for models without one (token ids only).
        sampling_defaults: values for what requests leave open, from the model's folder.
        prompts: reads prompts; any thread may use it.
        grammars: compiles what structured outputs must be; any thread may use it.
    """

    @without_default_device
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
            parallel: this engine's rank, if the caller runs an engine for each rank; all must get the same
                calls in the same order. With config.tensor_parallel_size > 1 the engine starts the other
                ranks itself.
            progress: called with (task, number done, number in all) until the engine is ready.

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
        source, self.plan = plan_model(config, parallel)
        self.config, self.model_config = config, self.plan.model
        self.tokenizer = load_tokenizer(source)
        self.sampling_defaults = read_sampling_defaults(source, config.generation_config)
        try:
            self.runner = self._load(source, decoder, progress)
            self._prepare(progress)
        except BaseException:
            self.close()
            raise

    def _load(
        self, source: ModelSource, decoder: Decoder | None, progress: PrepareProgress | None
    ) -> StepRunner:
        """Load the weights and allocate the KV cache, on all ranks."""
        loaded = None if progress is None else partial(progress, "loading weights")
        if self.config.tensor_parallel_size > 1:
            self._ranks = start_ranks(source, self.plan, loaded)
            self.plan = self._ranks.plan
        log_plan(self.plan, source)
        return self._ranks or make_runner(decoder or read_decoder(source, self.plan, loaded), self.plan)

    def _prepare(self, progress: PrepareProgress | None) -> None:
        """Make everything else, and do now what requests would otherwise wait for."""
        plan, vocab_size = self.plan, self.model_config.vocab_size
        self.prompts = PromptReader(
            self.tokenizer,
            vocab_size,
            max_model_len=plan.max_model_len,
            num_kv_tokens=plan.num_kv_tokens,
            message_control_tokens=self.config.message_control_tokens,
            pooling=self.model_config.pooling,
        )
        own = frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        self._eos_token_ids = self.model_config.eos_token_ids | own
        self.grammars = Grammars(self.tokenizer, vocab_size=vocab_size, eos_token_ids=self._eos_token_ids)
        self._reset_state()
        if self.config.prepare and self.runner.runs_ahead:
            self.runner.prepare(progress or (lambda *_: None))
            self._rehearse()
            freeze()
        self.runner.note_ready()

    def _reset_state(self) -> None:
        """Make the objects that hold the state of requests and blocks, all of them empty."""
        config, plan = self.config, self.plan
        self.manager = KVCacheManager(
            plan.num_blocks,
            plan.block_size,
            layout=plan.layout,
            enable_prefix_caching=config.enable_prefix_caching,
            max_kept_blocks=int(config.kept_cache_fraction * plan.num_blocks),
            bytes_per_block=plan.block_bytes,
        )
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=plan.max_num_seqs, max_num_batched_tokens=plan.max_num_batched_tokens
        )
        self.outputs = OutputProcessor(self.tokenizer)
        self._steps = Steps(self.runner, self.manager, self.scheduler, self.outputs, config.max_step_ms)
        self._in_doubt = False
        self._maker = RequestMaker(
            config.seed, plan.max_model_len, self._eos_token_ids, self.model_config.vocab_size
        )

    def _rehearse(self) -> None:
        """Answer a request that asks for every option, to set up what first use sets up; then forget it."""
        if min(self.plan.max_model_len, self.plan.num_kv_tokens) >= REHEARSAL_TOKENS:
            self.add_request([0, 0, 0], REHEARSAL if self.model_config.pooling is None else POOLED)
            while self.has_unfinished_requests:
                self.step()
            self.runner.reset()
            self._reset_state()

    @property
    def error(self) -> OctavoError | None:
        """The error after which the engine never runs again, because a rank has ended; else None."""
        return None if self._ranks is None else self._ranks.error

    @property
    def late_rank(self) -> int | None:
        """A rank that has not answered for 0.8 s, or None. Any thread may ask."""
        return None if self._ranks is None else self._ranks.late_rank

    def when_dead(self, call: Callable[[OctavoError], None]) -> None:
        """Register a function to be called in another thread as soon as a rank of the engine ends."""
        if self._ranks is not None:
            self._ranks.when_dead(call)

    def close(self) -> None:
        """End the other ranks; nothing runs afterwards. Dropping the engine does the same. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_unfinished_requests(self) -> int:
        """Unfinished requests of users; one with n completions counts once."""
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
        keep_cached: bool = False,
    ) -> RequestOutput:
        """Queue one request.

        Args:
            prompt: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or what `prompts` has read.
            params: how to continue it.
            request_id: unique among unfinished requests; default: a new one from `new_request_id`.
            cache_salt: requests share cached prefixes only with equal salts.
            prompt_logprobs_start: first prompt position whose log-probability is wanted; default 1 when
                params.prompt_logprobs is set. Tokens before it may come from the prefix cache.
            read_along: somebody reads the tokens as they come: EngineConfig.max_step_ms holds while it runs.
            priority: waiting requests with a lower number are admitted first; equal ones in order of arrival.
            keep_cached: a hint: evict its blocks after those of others (EngineConfig.kept_cache_fraction).
            grammar: params.structured as `grammars` compiled it, so that no step waits; None: compiled here.

        Returns:
            The output, which steps add to until it is `finished`.

        Raises:
            PromptError: the prompt is empty, malformed or holds ids outside the vocabulary.
            RequestTooLongError: it can never fit the model's context or the KV cache.
            SamplingParamsError: a parameter does not fit this model; StructuredOutputError: the grammar.
            ConfigError: params.structured needs a package that is not installed.
            InvalidArgumentError: a request with this id is still running, or the salt is not a string.
        """
        token_ids = self.prompts.read(prompt)
        self.prompts.check_params(params)
        self._maker.check(params)
        salt = salt_bytes(cache_salt)
        grammar = grammar or self.grammars.of(params)
        request_id = self._maker.checked_id(request_id, self.outputs)
        self._begin()
        requests = self._maker.make(
            request_id,
            token_ids.packed,
            params,
            lambda: self.manager.new_sequence(salt, is_kept=keep_cached),
            prompt_logprobs_start=prompt_logprobs_start,
            read_along=read_along,
            priority=priority,
            grammar=grammar,
        )
        pooling = self.model_config.pooling
        requests[0].pools_all = pooling is not None and pooling.tokens == "mean"
        output = self.outputs.add(requests, self.prompts.text_of(prompt), token_ids.listed)
        self.scheduler.add(requests[0])
        self._in_doubt = False
        return output

    def new_request_id(self) -> str:
        """Return the next number that is not the id of an unfinished request."""
        return self._maker.new_id(self.outputs)

    def abort(self, request_id: str) -> None:
        """End a request in any state and free its blocks; unknown or finished ids are ignored.

        Raises:
            InvalidArgumentError: the id is not a string.
        """
        if not isinstance(request_id, str):
            raise InvalidArgumentError(f"request_id must be a string, got {request_id!r}")
        self._begin()
        for request in self.outputs.unfinished(request_id):
            request.finish("abort")
            self._steps.close(request)
        self._in_doubt = False

    def step(self) -> None:
        """Launch the next step and process the one before. A request that fails fails alone."""
        self._begin()
        self._steps.run()
        self._in_doubt = False

    @property
    def spare_s(self) -> float:
        """Seconds to sleep before asking again, because arriving requests can join the next step; 0: run it.

        See step/pace.py.
        """
        return 0.0 if self._in_doubt else self._steps.spare_s

    def settle(self) -> None:
        """Start over if the last call was interrupted; see this file's first lines.

        Raises:
            EngineError: the device or the machine lets nothing start; the next call tries again.
        """
        if self._in_doubt:
            self._steps.start_over()
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
        return self._steps.num_computed_tokens

    def stats(self) -> EngineStats:
        """Return a snapshot of counters and of the block pool."""
        self.settle()
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_steps=self._steps.num_steps,
            num_computed_tokens=self._steps.num_computed_tokens,
            num_output_tokens=self._steps.num_output_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            late_work=self.runner.late_work(),
            sharing=self.runner.sharing(),
            kv=self.manager.stats(),
        )

    def _begin(self) -> None:
        """Note that a change has begun. The caller sets `_in_doubt` to False when all of it is done."""
        self.settle()
        self._in_doubt = True
