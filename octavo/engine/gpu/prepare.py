"""What happens before an engine on a GPU is ready, so that no step has to wait for it.

dry run    every variant of every graph, one layer of each kind: nothing runs, missing kernels compile
capture    every variant's graph; kernels are loaded
reserve    memory for what is launched beside graphs
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.engine.gpu.graphs import StepGraphs
from octavo.engine.memory.execution_plan import ExecutionPlan
from octavo.engine.memory.working import SMALL_BYTES, rare_bytes
from octavo.engine.step.result import LateWork, PrepareProgress
from octavo.errors import EngineError
from octavo.garbage import no_full_collections, paused
from octavo.kernels.compiled import compile_kernels, num_kernels

# Pinned memory comes in powers of two. A step holds a few blocks of a size at one time, or dozens of small
# ones when many requests begin.
_PINNED_BLOCKS = {1 << power: 64 if power <= 12 else 16 if power <= 20 else 4 for power in range(2, 23)}


class Preparation:
    """Prepares a runner, and counts what was left for later."""

    def __init__(self, kinds: Sequence[StepGraphs[Any]], plan: ExecutionPlan) -> None:
        """Keep what there is to prepare.

        Args:
            kinds: all graphs.
            plan: says the CUDA device, and with rare_bytes how much memory launches beside graphs take.
        """
        self._kinds = kinds
        self._device = plan.device
        self._reserved_bytes = rare_bytes(plan.model.vocab_size, plan.max_num_seqs)
        self._at_ready = LateWork()

    def compile(self, launch_others: Callable[[], None], progress: PrepareProgress) -> None:
        """Compile the kernels that are missing.

        Args:
            launch_others: launches the kernels that no graph holds; called after the graphs' kernels.
            progress: see StepRunner.prepare.

        Raises:
            EngineError: a kernel does not compile, or the cache of kernels cannot be written.
        """

        def launch_all() -> None:
            self._launch_graphs()
            launch_others()

        try:
            with no_full_collections():
                compile_kernels(launch_all, lambda *count: progress("compiling kernels", *count))
        except Exception as error:
            raise EngineError(f"the GPU's kernels cannot be compiled: {error!r}") from error
        # Graphs have memory of their own.
        torch.cuda.empty_cache()

    def capture(self, progress: PrepareProgress) -> None:
        """Capture all graphs, and reserve memory for what is launched beside them.

        Launches make millions of objects: garbage collections would take as long as all captures.
        """
        variants = [(graphs, variant) for graphs in self._kinds for variant in graphs.variants()]
        with paused():
            for number, (graphs, variant) in enumerate(variants, start=1):
                graphs.capture(variant)
                progress("capturing CUDA graphs", number, len(variants))
        self._reserve()

    def note_ready(self) -> None:
        """See StepRunner."""
        self._at_ready = self._work_so_far()

    def late_work(self) -> LateWork:
        """See StepRunner."""
        now = self._work_so_far()
        return LateWork(*(after - before for after, before in zip(now, self._at_ready, strict=True)))

    def _launch_graphs(self) -> None:
        """Launch every kernel of the graphs once. Call it only where launches compile instead of run."""
        for graphs in self._kinds:
            network = graphs.network.shortened()
            for variant in graphs.variants():
                graphs.launch(variant, network)

    def _reserve(self) -> None:
        """Let PyTorch's allocators take memory from the driver, and keep it."""
        torch.empty(self._reserved_bytes, dtype=torch.uint8, device=self._device)
        mib = 2**20
        small = [torch.empty(mib, dtype=torch.uint8, device=self._device) for _ in range(SMALL_BYTES // mib)]
        del small
        pinned = []
        for num_bytes, number in _PINNED_BLOCKS.items():
            pinned += [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(number)]

    def _work_so_far(self) -> LateWork:
        on_device = torch.cuda.memory_stats(self._device)["num_device_alloc"]
        num_captured = sum(graphs.num_captured for graphs in self._kinds)
        on_host = torch.cuda.host_memory_stats()["num_host_alloc"]
        return LateWork(num_kernels(), num_captured, on_device + on_host)
