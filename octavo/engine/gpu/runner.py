"""The runner for NVIDIA GPUs: a step is a few replays of CUDA graphs, launched before the last step is known.

    decode step   gather the rows' tokens ---- network ---.
                                                          +--> hidden --- LM head, sample, move the rows on
    mixed step    tokens from the host ------- network ---'

Every part is a graph of its own (decode_graphs, mixed_graphs, sampling_graphs). Log-probabilities and
changes of logits, which few requests ask for, are launched after the last graph. Nothing waits for the host.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.attention import DeviceForest, KVCache
from octavo.attention.plan.prefix_forest import Sharing
from octavo.engine.gpu.device_rows import DeviceRows
from octavo.engine.gpu.graphs import CapturedNetwork, GraphPool, StepBuffers
from octavo.engine.gpu.kernel_cache import KernelCache
from octavo.engine.gpu.outcome import Outcome
from octavo.engine.gpu.prepare import Preparation
from octavo.engine.gpu.step_graphs import DecodeGraphs, MixedGraphs, SamplingGraphs
from octavo.engine.memory import ExecutionPlan
from octavo.engine.request import Request
from octavo.engine.sampling.prompt_logprobs import prompt_logprobs
from octavo.engine.sampling.sampler import Sampler
from octavo.engine.sampling.tops import ROWS_AT_ONCE, Tops, log_softmax, pack_tops
from octavo.engine.step.pooled import pooled_parts
from octavo.engine.step.result import LateWork, PrepareProgress, PromptLogprobs, StepResult
from octavo.engine.step.scheduled import ScheduledRequest, SchedulerOutput
from octavo.engine.step.step_input import StepInput, StepInputBuilder
from octavo.engine.structured.token_masks import TokenMasks
from octavo.kernels.copies import to_device, to_host
from octavo.models import Decoder


class GpuRunner:
    """StepRunner for decoders whose attention runs by Triton kernels.

    Attributes:
        graphs: all kinds of graphs.
    """

    runs_ahead = True

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        plan: ExecutionPlan,
        kernels: KernelCache,
        masks: TokenMasks | None = None,
    ) -> None:
        """Allocate the device's state.

        Args:
            decoder: the network.
            kv_cache: its cache.
            plan: device and sizes of both.
            kernels: where compiled kernels are kept.
            masks: forbids what grammars do not take; None: its own.
        """
        self.decoder = decoder
        self.kv_cache = kv_cache
        self._device = plan.device
        self._inputs = StepInputBuilder(plan)
        self._rows = DeviceRows(self._inputs.tables, plan.device)
        self._forests = _forests_of(decoder, kv_cache, plan)
        self._buffers = StepBuffers(decoder, plan)
        network = CapturedNetwork(decoder, kv_cache, self._forests, plan.max_model_len)
        with torch.cuda.device(plan.device):
            shared = (GraphPool(), network, self._rows, self._buffers)
            self._copies = torch.cuda.Stream()
        self.graphs = (MixedGraphs(*shared), DecodeGraphs(*shared), SamplingGraphs(*shared))
        self._mixed_graphs, self._decode_graphs, self._sampling_graphs = self.graphs
        self._sampler = Sampler(decoder.config.vocab_size, plan.device, masks)
        self._kernels = kernels
        sizes = (plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len, plan.shares_prefixes)
        self._kernels_job = (decoder.describe(), kv_cache.data.dtype, kv_cache.block_size, *sizes)
        self._preparation = Preparation(self.graphs, plan)
        # The requests of the last decode step, whose rows and forests the device has, and whether they share.
        self._batch: list[Request] = []
        self._shares = False
        # Windows move on: a plan of them is made anew before much of it is behind them.
        windows = [forest.window for forest in self._forests if forest is not None and forest.window]
        self._most_steps = min(windows, default=0) // 8
        self._num_steps = 0
        self._newest: Outcome | None = None
        # What the plan on the device saves in a step, and what all steps have saved.
        self._plan_sharing = self._sharing = Sharing()

    @torch.inference_mode()
    def prepare(self, progress: PrepareProgress) -> None:
        """See StepRunner."""
        with torch.cuda.device(self._device):
            if not self._kernels.is_complete(self._kernels_job):
                self._preparation.compile(self._launch_others, progress)
                self._kernels.note_complete(self._kernels_job)
            self._preparation.capture(progress)
            self._share_once()
            self._mask_once()

    def note_ready(self) -> None:
        """See StepRunner."""
        self._preparation.note_ready()
        self._sharing = Sharing()

    def late_work(self) -> LateWork:
        """See StepRunner."""
        return self._preparation.late_work()

    def sharing(self) -> Sharing:
        """See StepRunner."""
        return self._sharing

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> Callable[[], StepResult]:
        """See StepRunner."""
        requests = [item.request for item in step.scheduled]
        # Triton launches on the current device, whatever its arguments live on.
        with torch.cuda.device(self._device):
            self.kv_cache.copy_blocks(step.block_copies)
            if self._rows.update_tables(requests):
                self._batch = []
            if all(
                item.samples and item.num_new_tokens == 1 and self._rows.holds(item.request, item.start)
                for item in step.scheduled
            ):
                return self._decode(requests, [item.end for item in step.scheduled])
            self._batch = []
            return self._mixed(step.scheduled)

    def has_finished(self) -> bool:
        """See StepRunner."""
        return self._newest is None or self._newest.is_copied()

    def release(self, request: Request) -> None:
        """See StepRunner."""
        self._sampler.release(request)

    def reset(self) -> None:
        """See StepRunner. Steps in flight do no harm: the stream runs them before any that follow."""
        self._batch = []
        self._rows.reset()
        self._sampler.reset()

    def close(self) -> None:
        """See StepRunner."""
        for graphs in self.graphs:
            graphs.release()

    def _decode(self, requests: list[Request], ends: list[int]) -> Callable[[], StepResult]:
        """Run a decode step."""
        self._rows.send_tables()
        self._num_steps += 1
        if requests != self._batch or (self._shares and 0 < self._most_steps <= self._num_steps):
            self._set_batch(requests, ends)
        self._sharing = self._sharing.after(self._plan_sharing)
        self._decode_graphs.run(len(requests), shares=self._shares)
        return self._sample(requests, ends)

    def _set_batch(self, requests: list[Request], seq_lens: list[int]) -> None:
        """Tell the device which rows the next steps run, and which prefixes they share."""
        rows = [request.row for request in requests]
        self._decode_graphs.set_batch(rows)
        num_columns = -(-max(seq_lens) // self.kv_cache.block_size)
        block_tables = [tables.rows(rows, num_columns) for tables in self._inputs.tables]
        self._shares = self._share(block_tables, np.array(seq_lens), np.arange(len(rows) + 1))
        self._batch, self._num_steps = requests, 0

    def _share(
        self, block_tables: Sequence[np.ndarray], seq_lens: np.ndarray, cu_seqlens_q: np.ndarray
    ) -> bool:
        """Send a step's forest of each group of layers to the device; False if sharing would not pay."""
        self._plan_sharing = Sharing()
        if len(seq_lens) == 1:
            return False
        plans = [
            (forest, forest.plan(block_table, seq_lens, cu_seqlens_q))
            for forest, block_table in zip(self._forests, block_tables, strict=True)
            if forest is not None
        ]
        pays = any(plan.num_units for _, plan in plans)
        if pays:
            self._plan_sharing = plans[0][1].sharing
            for forest, plan in plans:
                forest.upload(plan)
        return pays

    def _share_once(self) -> None:
        """Plan a step of sequences that share all but their last block, as the first real one will be."""
        num_seqs, num_columns = self._inputs.tables[0].table.shape
        table = np.tile(np.arange(num_columns, dtype=np.int32), (num_seqs, 1))
        table[:, -1] = np.arange(num_seqs)
        seq_lens = np.full(num_seqs, num_columns * self.kv_cache.block_size)
        self._share([table] * len(self._forests), seq_lens, np.arange(num_seqs + 1))

    def _mask_once(self) -> None:
        """Apply a mask that allows all tokens to rows that nobody reads: PyTorch then loads its kernels."""
        logits = self._sampling_graphs.logits[:ROWS_AT_ONCE].float()
        rows = list(range(len(logits)))
        masks = np.full((len(rows), -(-logits.shape[1] // 32)), -1, dtype=np.int32)
        self._sampler.masks.apply_(logits, rows, masks)
        self._sampler.masks.apply_(logits, rows[1:], masks[1:])

    def _mixed(self, scheduled: list[ScheduledRequest]) -> Callable[[], StepResult]:
        """Run a mixed step."""
        step_input = self._inputs.build(scheduled)
        hidden = self._forward(step_input, scheduled)
        if self.decoder.pooler is not None:
            pooled = pooled_parts(self.decoder, scheduled, hidden)
            self._newest = Outcome([], self._buffers.outcome[:0], None, [], [], self._copies, pooled)
            return self._newest.wait
        chunks = prompt_logprobs(self.decoder, scheduled, hidden)
        sampling = [item for item in scheduled if item.samples]
        requests, ends = [item.request for item in sampling], [item.end for item in sampling]
        if not requests:
            # It is waited for like any other step, because plans of steps rely on when it ends.
            self._newest = Outcome([], self._buffers.outcome[:0], None, [], chunks, self._copies)
            return self._newest.wait
        rows = [request.row for request in requests]
        self._rows.write_options(requests)
        self._buffers.set_sampling(rows, step_input.logits_indices, ends)
        self._buffers.select(len(rows))
        return self._sample(requests, ends, chunks)

    def _forward(self, step_input: StepInput, scheduled: list[ScheduledRequest]) -> Tensor:
        input_ids = self._mixed_graphs.load(step_input)
        self._fill_in_tokens(input_ids, step_input, scheduled)
        block_tables = [group.block_table for group in step_input.groups]
        shares = self._share(block_tables, step_input.seq_lens, step_input.cu_seqlens_q)
        self._sharing = self._sharing.after(self._plan_sharing)
        is_fresh = len(scheduled) == 1 and scheduled[0].start == 0
        return self._mixed_graphs.run(input_ids.shape[0], shares=shares, is_fresh=is_fresh)

    def _fill_in_tokens(
        self, input_ids: Tensor, step_input: StepInput, scheduled: list[ScheduledRequest]
    ) -> None:
        """Fill in the input tokens that only the device knows: those that the previous step sampled."""
        unknown = [
            (token, item.request.row)
            for token, item in zip(step_input.cu_seqlens_q[:-1].tolist(), scheduled, strict=True)
            if item.end > len(item.request.token_ids)
        ]
        if unknown:
            places, rows = to_device(np.array(unknown).T.copy(), self._device)
            input_ids.index_copy_(0, places, self._rows.tokens[rows])

    def _sample(
        self, requests: list[Request], ends: list[int], chunks: Sequence[PromptLogprobs] = ()
    ) -> Callable[[], StepResult]:
        """Sample a token for each request whose row the buffers name; the device's rows get them.

        Args:
            requests: S requests.
            ends: positions of the tokens to be sampled.
            chunks: of prompt log-probabilities that the step found.
        """
        adjusted = [place for place, request in enumerate(requests) if request.adjustments]
        reported = [place for place, request in enumerate(requests) if request.params.logprobs is not None]
        if self._newest is not None:
            self._newest.wait_on_device()
        outcome = self._sampling_graphs.sample(
            len(requests),
            filters=any(request.asks_for_filters for request in requests),
            keeps=bool(adjusted or reported),
        )
        for part in _parts(adjusted):
            self._sample_adjusted(part, requests, ends)
        self._rows.set_positions(requests, ends)
        tops = self._find_tops(reported, requests, outcome) if reported else None
        self._newest = Outcome(requests, outcome, tops, reported, chunks, self._copies)
        return self._newest.wait

    def _sample_adjusted(self, places: list[int], requests: list[Request], ends: list[int]) -> None:
        """Sample again for requests that change their logits."""
        asking = [requests[place] for place in places]
        at, buffers = to_device(np.array(places), self._device), self._buffers
        logits = self._sampling_graphs.logits[at].float()
        self._sampler.adjust_(logits, asking, [ends[place] for place in places])
        rows = buffers.rows[at]
        outcome = torch.empty_like(rows)
        sampled = self._rows.sample(logits, rows, buffers.positions[at], outcome, filters=True)
        buffers.outcome.index_copy_(0, at, outcome)
        self._sampler.count(asking, sampled)

    def _launch_others(self) -> None:
        """Launch, for a row of padding, the kernels that steps launch behind their graphs."""
        logits, positions = self._sampling_graphs.logits[:1], self._buffers.positions[:1]
        log_softmax(logits)
        rows = torch.full_like(positions, -1)
        self._rows.sample(logits.float(), rows, positions, torch.empty_like(rows), filters=True)

    def _find_tops(self, places: list[int], requests: list[Request], outcome: Tensor) -> Tops:
        """Find the log-probabilities that some requests want of their new tokens."""
        nums = [requests[place].params.logprobs or 0 for place in places]
        packed = []
        for part in _parts(places):
            at = to_device(np.array(part), self._device)
            # A row without finite logits has no token; its request ends with an error.
            own = outcome[at].clamp(min=0).long()
            packed.append(pack_tops(log_softmax(self._sampling_graphs.logits[at]), own, max(nums)))
        return Tops(nums, to_host(torch.cat(packed)))


def _parts(places: list[int]) -> list[list[int]]:
    return [places[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(places), ROWS_AT_ONCE)]


# What a shorter window shows fits caches of the GPU: to read it once saves less than more kernels cost.
_LEAST_WINDOW = 512


def _forests_of(decoder: Decoder, kv_cache: KVCache, plan: ExecutionPlan) -> tuple[DeviceForest | None, ...]:
    """Return a forest for each group of layers, None for one that has no layers."""
    forests: list[DeviceForest | None] = []
    for group in plan.layout.groups:
        if not (plan.shares_prefixes and group.layers):
            forests.append(None)
            continue
        kind = group.kind
        if kind.window is not None and kind.window < _LEAST_WINDOW:
            forests.append(None)
            continue
        alike = next((each for each in forests if each is not None and each.heads[1:] == kind.shape), None)
        forests.append(
            DeviceForest(
                max_num_seqs=plan.max_num_seqs,
                max_num_tokens=plan.max_num_tokens,
                num_heads=decoder.num_heads,
                num_kv_heads=kind.num_kv_heads,
                head_dim=kind.head_dim,
                block_size=kv_cache.block_size,
                dtype=kv_cache.data.dtype,
                device=kv_cache.data.device,
                window=kind.window,
                beside=alike,
            )
        )
    return tuple(forests)
