"""Runs the model on an NVIDIA GPU, one step ahead of the host unless a request's options need the host.

    host     | launch 1 | launch 2 | wait 1, process | launch 3 | wait 2, process | ...
    device              |------ 1 ------|------ 2 ------|------ 3 ------|

A step is one of two kinds:

    decode   every sequence feeds the token that was sampled for it last, which is in the device's rows: one
             CUDA graph runs the network, samples, and moves the rows on. If a request's options need the
             host, the graph ends with the logits.
    mixed    prompts are under way, beside sequences that decode: the host sends the tokens, one CUDA graph
             runs the network, and a few launches sample.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo.attention import DeviceForest, KVCache
from octavo.engine.gpu.decode_graphs import DecodeGraphs
from octavo.engine.gpu.graphs import CapturedNetwork
from octavo.engine.gpu.mixed_graphs import MixedGraphs
from octavo.engine.gpu.outcome import Outcome
from octavo.engine.gpu.rows import DeviceRows
from octavo.engine.request import Request
from octavo.engine.sampling.prompt_logprobs import prompt_logprobs
from octavo.engine.sampling.sampler import Sampler, Top
from octavo.engine.scheduler import ScheduledRequest, SchedulerOutput
from octavo.engine.step_input import StepInput, StepInputBuilder
from octavo.engine.step_result import StepResult
from octavo.gpu.copies import to_device
from octavo.models import Decoder


class GpuRunner:
    """StepRunner for decoders whose attention runs by Triton kernels."""

    runs_ahead = True

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        device: torch.device,
        share_prefixes: bool,
    ) -> None:
        """Allocate the device's state.

        Args:
            decoder: the network.
            kv_cache: its cache.
            max_num_seqs: most sequences of a step.
            max_num_tokens: most tokens of a step.
            max_model_len: longest sequence, tokens.
            device: of both.
            share_prefixes: read blocks that several sequences of a step have in common once for all.
        """
        self.decoder = decoder
        self.kv_cache = kv_cache
        self._device = device
        self._inputs = StepInputBuilder(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=kv_cache.block_size
        )
        self._rows = DeviceRows(self._inputs.tables, device)
        self._forest = None
        if share_prefixes:
            self._forest = _forest_of(decoder, kv_cache, max_num_seqs, max(max_num_seqs, max_num_tokens))
        network = CapturedNetwork(decoder, kv_cache, self._forest, max_model_len, device)
        self.decode_graphs = DecodeGraphs(network, self._rows)
        self.mixed_graphs = MixedGraphs(network, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens)
        self._sampler = Sampler(decoder.config.vocab_size, device)
        # The requests of the last decode step, whose rows and forest the device has, and whether they share.
        self._batch: list[Request] = []
        self._shares = False

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> Callable[[], StepResult]:
        """See StepRunner."""
        requests = [item.request for item in step.scheduled]
        # Triton launches on the current device, whatever its arguments live on.
        with torch.cuda.device(self._device):
            self.kv_cache.copy_blocks(step.block_copies)
            if self._rows.update_tables(requests):
                self._batch = []
            if all(item.samples and self._rows.holds(item.request, item.start) for item in step.scheduled):
                return self._decode(requests, [item.end for item in step.scheduled])
            self._batch = []
            return self._mixed(step.scheduled)

    def release(self, request: Request) -> None:
        """See StepRunner."""
        self._sampler.release(request)

    def reset(self) -> None:
        """See StepRunner. Steps under way do no harm: the stream runs them before any that follow."""
        self._batch = []
        self._rows.reset()
        self._sampler.reset()

    def _decode(self, requests: list[Request], ends: list[int]) -> Callable[[], StepResult]:
        """Run a decode step."""
        self._rows.send_tables()
        if requests != self._batch:
            self._set_batch(requests, ends)
        if all(request.can_run_ahead for request in requests):
            filters = any(request.asks_for_filters for request in requests)
            token_ids = self.decode_graphs.decode(len(requests), shares=self._shares, filters=filters)
            self._rows.advance(requests)
            return Outcome(requests, token_ids).wait
        logits = self.decode_graphs.logits(len(requests), shares=self._shares)
        token_ids, tops = self._sample(logits, requests, ends)
        return Outcome(requests, token_ids, tops).wait

    def _set_batch(self, requests: list[Request], seq_lens: list[int]) -> None:
        """Tell the device which rows the next steps run, and what these have in common."""
        rows = [request.row for request in requests]
        self.decode_graphs.set_batch(rows)
        num_columns = -(-max(seq_lens) // self.kv_cache.block_size)
        block_table = self._inputs.tables.rows(rows, num_columns)
        self._shares = self._share(block_table, np.array(seq_lens), np.arange(len(rows) + 1))
        self._batch = requests

    def _share(self, block_table: np.ndarray, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray) -> bool:
        """Send a step's forest to the device; False if sharing would not pay."""
        if self._forest is None:
            return False
        plan = self._forest.plan(block_table, seq_lens, cu_seqlens_q)
        if plan.num_units:
            self._forest.upload(plan)
        return plan.num_units > 0

    def _mixed(self, scheduled: list[ScheduledRequest]) -> Callable[[], StepResult]:
        """Run a mixed step."""
        step_input = self._inputs.build(scheduled)
        hidden = self._forward(step_input, scheduled)
        chunks = prompt_logprobs(self.decoder, scheduled, hidden)
        sampling = [item for item in scheduled if item.samples]
        if not sampling:
            return lambda: StepResult({}, chunks)
        requests, ends = [item.request for item in sampling], [item.end for item in sampling]
        logits = self.decoder.compute_logits(hidden[to_device(step_input.logits_indices, self._device)])
        token_ids, tops = self._sample(logits, requests, ends)
        return Outcome(requests, token_ids, tops, chunks).wait

    def _forward(self, step_input: StepInput, scheduled: list[ScheduledRequest]) -> Tensor:
        input_ids = self.mixed_graphs.load(step_input)
        self._fill_in_tokens(input_ids, step_input, scheduled)
        shares = self._share(step_input.block_table, step_input.seq_lens, step_input.cu_seqlens_q)
        is_fresh = len(scheduled) == 1 and scheduled[0].start == 0
        return self.mixed_graphs.forward(input_ids.shape[0], shares=shares, is_fresh=is_fresh)

    def _fill_in_tokens(
        self, input_ids: Tensor, step_input: StepInput, scheduled: list[ScheduledRequest]
    ) -> None:
        """Fill in the input tokens that only the device knows: those the step before sampled."""
        unknown = [
            (token, item.request.row)
            for token, item in zip(step_input.cu_seqlens_q[:-1].tolist(), scheduled, strict=True)
            if item.end > len(item.request.token_ids)
        ]
        if unknown:
            places, rows = to_device(np.array(unknown).T.copy(), self._device)
            input_ids.index_copy_(0, places, self._rows.tokens[rows])

    def _sample(
        self, logits: Tensor, requests: list[Request], ends: list[int]
    ) -> tuple[Tensor, list[Top | None]]:
        """Sample a token for each request; the device's rows get them.

        Args:
            logits: [S, V].
            requests: S requests.
            ends: positions of the tokens to be sampled.

        Returns:
            [S] int32 token ids, -1 where logits were not finite, and the wanted log-probabilities.
        """
        rows = self._rows.rows_of(requests)
        last = to_device(np.array(ends, dtype=np.int32) - 1, self._device)
        logprobs = self._sampler.wanted_logprobs(logits, requests)
        if not all(request.can_run_ahead for request in requests):
            logits = logits.float()
            self._sampler.adjust_(logits, requests)
        filters = any(request.asks_for_filters for request in requests)
        ids, is_finite = self._rows.sample(logits, rows, last, filters=filters)
        self._rows.put(rows, requests, ids, ends)
        tops = self._sampler.tops(logprobs, [] if logprobs is None else ids.tolist(), requests)
        return ids.where(is_finite, -1), tops


def _forest_of(decoder: Decoder, kv_cache: KVCache, max_num_seqs: int, max_num_tokens: int) -> DeviceForest:
    return DeviceForest(
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.config.head_dim,
        block_size=kv_cache.block_size,
        dtype=kv_cache.data.dtype,
        device=kv_cache.data.device,
    )
