"""Runs the model on a scheduled step: arrays in, sampled tokens and prompt log-probabilities out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention import ForestPlan, KVCache
from octavo.attention.interface import choose_impl
from octavo.engine.decode_graphs import DecodeGraphs
from octavo.engine.gpu_sampling import GpuSampler, is_plain
from octavo.engine.request import Request
from octavo.engine.sampler import SampledToken, Sampler, top_logprobs
from octavo.engine.scheduler import ScheduledRequest, SchedulerOutput
from octavo.engine.step_input import StepInput, StepInputBuilder, to_device
from octavo.models import Decoder

# Logits of prompt positions are computed in slices of at most this size.
_MAX_LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens one step computed.

    Attributes:
        request: whose prompt.
        start: prompt position of the first entry.
        tops: per position (token id, log-probability, rank) tuples, the prompt's own token included.
    """

    request: Request
    start: int
    tops: list[list[tuple[int, float, int]]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found.

    Attributes:
        sampled: one entry per scheduled request whose last known token was reached.
        prompt_logprobs: chunks of prompt log-probabilities.
    """

    sampled: dict[Request, SampledToken]
    prompt_logprobs: list[PromptLogprobs]


class ModelRunner:
    """Owns the decoder, the KV cache and the step's arrays."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        share_prefixes: bool = True,
    ) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.device = device
        self.share_prefixes = share_prefixes
        max_blocks = -(-max_model_len // kv_cache.block_size)
        self.inputs = StepInputBuilder(
            max_num_seqs=max_num_seqs, max_blocks=max_blocks, block_size=kv_cache.block_size
        )
        self.sampler = Sampler(decoder.config.vocab_size, device)
        self.graphs: DecodeGraphs | None = None
        self._gpu_sampler: GpuSampler | None = None
        if choose_impl(decoder.attention_impl, device.type, kv_cache.data.dtype) == "triton":
            self._gpu_sampler = GpuSampler(device)
            self.graphs = DecodeGraphs(
                decoder, kv_cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, device=device
            )

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepResult:
        """Compute one step."""
        self.kv_cache.copy_blocks(step.block_copies)
        step_input = self.inputs.build(step.scheduled)
        if self.graphs is not None and _is_decode(step.scheduled):
            requests = [item.request for item in step.scheduled]
            logits, positions = self.graphs.run(step_input)
            return StepResult(dict(zip(requests, self._pick(logits, positions, requests), strict=True)), [])
        hidden = self._forward(step_input)
        prompt_logprobs = [
            chunk
            for item, start in zip(step.scheduled, step_input.cu_seqlens_q.tolist(), strict=False)
            if (chunk := self._prompt_logprobs(item, hidden[start : start + item.num_new_tokens]))
        ]
        return StepResult(self._sample(step.scheduled, hidden, step_input), prompt_logprobs)

    def _forward(self, step_input: StepInput) -> Tensor:
        metadata = step_input.metadata(self._plan(step_input), self.device)
        input_ids = to_device(step_input.input_ids, self.device)
        return self.decoder.forward(input_ids, metadata.positions, self.kv_cache, metadata)

    def _plan(self, step_input: StepInput) -> ForestPlan | None:
        if self.graphs is not None:
            return None  # the GPU makes its own task map
        if not self.share_prefixes:
            return ForestPlan.flat(step_input.seq_lens, step_input.cu_seqlens_q)
        return ForestPlan.from_block_tables(
            step_input.block_table,
            step_input.seq_lens,
            step_input.cu_seqlens_q,
            self.kv_cache.block_size,
        )

    def _sample(
        self, scheduled: list[ScheduledRequest], hidden: Tensor, step_input: StepInput
    ) -> dict[Request, SampledToken]:
        requests = [item.request for item in scheduled if item.samples]
        if not requests:
            return {}
        rows = hidden[to_device(step_input.logits_indices, self.device)]
        logits = self.decoder.compute_logits(rows)
        positions = to_device(step_input.positions[step_input.logits_indices], self.device)
        return dict(zip(requests, self._pick(logits, positions, requests), strict=True))

    def _pick(self, logits: Tensor, positions: Tensor, requests: list[Request]) -> list[SampledToken]:
        if self._gpu_sampler is not None and all(is_plain(request) for request in requests):
            return self._gpu_sampler.sample(logits, positions, requests)
        return self.sampler.sample(logits.float(), requests)

    def _prompt_logprobs(self, item: ScheduledRequest, hidden: Tensor) -> PromptLogprobs | None:
        """Log-probabilities of the prompt tokens that follow this chunk's positions, where wanted.

        Args:
            item: the request and its chunk of tokens.
            hidden: [num_new_tokens, hidden size]; row i predicts position num_computed_tokens + i + 1.
        """
        request = item.request
        if request.prompt_logprobs_start is None:
            return None
        first = request.num_computed_tokens + 1
        start = max(first, request.prompt_logprobs_start)
        stop = min(first + item.num_new_tokens, request.num_prompt_tokens)
        if start >= stop:
            return None
        num = request.params.prompt_logprobs or 0
        wanted = hidden[start - first : stop - first]
        tops: list[list[tuple[int, float, int]]] = []
        for rows in wanted.split(max(1, _MAX_LOGITS_BYTES // (4 * self.decoder.config.vocab_size))):
            logprobs = self.decoder.compute_logits(rows).float().log_softmax(-1)
            for row in logprobs:
                tops.append(top_logprobs(row, request.token_ids[start + len(tops)], num))
        return PromptLogprobs(request, start, tops)


def _is_decode(scheduled: list[ScheduledRequest]) -> bool:
    return all(
        item.num_new_tokens == 1 and item.samples and item.request.num_output_tokens > 0 for item in scheduled
    )
