"""The runner for any device: it runs each step to its end, then returns the sampled tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.attention import ForestPlan, KVCache
from octavo.attention.plan.prefix_forest import Sharing
from octavo.engine.memory import ExecutionPlan
from octavo.engine.request import Request
from octavo.engine.sampling.prompt_logprobs import prompt_logprobs
from octavo.engine.sampling.sampler import SampledToken, Sampler
from octavo.engine.step.pooled import pooled_parts
from octavo.engine.step.result import LateWork, PrepareProgress, StepResult
from octavo.engine.step.scheduled import ScheduledRequest, SchedulerOutput
from octavo.engine.step.step_input import StepInput, StepInputBuilder
from octavo.engine.structured.token_masks import TokenMasks
from octavo.engine.torch_settings import StepThreads
from octavo.kernels.copies import to_device
from octavo.models import Decoder


class ModelRunner:
    """StepRunner for any device. The step is over when `launch` returns."""

    runs_ahead = False

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        plan: ExecutionPlan,
        masks: TokenMasks | None = None,
    ) -> None:
        """Allocate block tables and a sampler.

        Args:
            decoder: the network.
            kv_cache: its cache.
            plan: device and sizes of both.
            masks: forbids what grammars do not take; None: its own.
        """
        self.decoder = decoder
        self.kv_cache = kv_cache
        self._device = plan.device
        self._shares_prefixes = plan.shares_prefixes
        self._groups = plan.layout.groups
        self._inputs = StepInputBuilder(plan)
        self._sampler = Sampler(decoder.config.vocab_size, plan.device, masks)
        self._sharing = Sharing()
        self._threads = StepThreads()

    def prepare(self, progress: PrepareProgress) -> None:
        """See StepRunner: there is nothing to prepare."""

    def note_ready(self) -> None:
        """See StepRunner."""
        self._sharing = Sharing()

    def late_work(self) -> LateWork:
        """See StepRunner."""
        return LateWork()

    def sharing(self) -> Sharing:
        """See StepRunner."""
        return self._sharing

    def launch(self, step: SchedulerOutput) -> Callable[[], StepResult]:
        """See StepRunner."""
        with self._threads.for_step():
            result = self._execute(step)
        return lambda: result

    def has_finished(self) -> bool:
        """See StepRunner: `launch` returns when the step has run."""
        return True

    def release(self, request: Request) -> None:
        """See StepRunner."""
        self._sampler.release(request)

    def reset(self) -> None:
        """See StepRunner."""
        for tables in self._inputs.tables:
            tables.reset()
        self._sampler.reset()

    def close(self) -> None:
        """See StepRunner: there are no graphs."""

    @torch.inference_mode()
    def _execute(self, step: SchedulerOutput) -> StepResult:
        self.kv_cache.copy_blocks(step.block_copies)
        step_input = self._inputs.build(step.scheduled)
        hidden = self._forward(step_input)
        if self.decoder.pooler is not None:
            return StepResult({}, pooled=pooled_parts(self.decoder, step.scheduled, hidden))
        sampled = self._sample(step.scheduled, hidden, step_input)
        return StepResult(sampled, prompt_logprobs(self.decoder, step.scheduled, hidden))

    def _forward(self, step_input: StepInput) -> Tensor:
        plans = [self._plan(step_input, group) for group in range(len(step_input.groups))]
        self._sharing = self._sharing.after(next(plan.sharing for plan in plans if plan is not None))
        input_ids = to_device(step_input.input_ids, self._device)
        groups = step_input.metadata(plans, self._device)
        return self.decoder.forward(input_ids, self.kv_cache, *groups)

    def _plan(self, step_input: StepInput, group: int) -> ForestPlan | None:
        kind = self._groups[group]
        if not kind.layers:
            return None
        lengths, window = (step_input.seq_lens, step_input.cu_seqlens_q), kind.kind.window
        if not self._shares_prefixes:
            return ForestPlan.flat(*lengths, window=window)
        table = step_input.groups[group].block_table
        return ForestPlan.from_block_tables(table, *lengths, self.kv_cache.block_size, window=window)

    def _sample(
        self, scheduled: list[ScheduledRequest], hidden: Tensor, step_input: StepInput
    ) -> dict[Request, SampledToken]:
        sampling = [item for item in scheduled if item.samples]
        if not sampling:
            return {}
        requests, ends = [item.request for item in sampling], [item.end for item in sampling]
        rows = hidden[to_device(step_input.logits_indices, self._device)]
        logits = self.decoder.compute_logits(rows).float()
        return dict(zip(requests, self._sampler.sample(logits, requests, ends), strict=True))
