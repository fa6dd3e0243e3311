"""Ranks on the GPUs of one machine: they sum over memory that all of them map, and through NCCL.

All operations go to the current stream, so that CUDA graphs capture them like any kernel. All ranks get the
same bits. NCCL's order of sums depends on the size of the tensor; over shared memory it is that of the ranks.
"""

import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedModelError
from octavo.parallel.choice import choose_way, describe, two_shot_bytes
from octavo.parallel.handle import PeerLostError, TensorParallel
from octavo.parallel.shared_memory import SharedMemory, unsupported_reason

logger = logging.getLogger(__name__)

# Values of a sum for which NCCL takes what it takes for the largest.
_LARGE_SUM = 2**23
# Dtypes of what is summed over shared memory.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class NcclCollectives:
    """Collectives over a torch process group object; torch's global default group is never touched."""

    def __init__(self, group: Any, size: int, *, in_order: bool = False) -> None:
        """Keep the group; `share_memory` may follow.

        Args:
            group: a process group that has met.
            size: number of ranks.
            in_order: all sums have the order of ranks: once memory is shared, NCCL sums no floats.
        """
        from torch.distributed import distributed_c10d

        api: Any = distributed_c10d
        self._group = group
        self._size = size
        self._in_order = in_order
        self._end: threading.Thread | None = None
        self._memory: SharedMemory | None = None
        self._why_not = "as asked for"
        # Not asynchronous: on the current stream, instead of one of NCCL's own beside it.
        self._sum, self._gather = api.AllreduceOptions(), api.AllgatherOptions()
        self._sum.asyncOp = self._gather.asyncOp = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it."""
        memory = self._memory
        way = "nccl"
        if memory is not None and tensor.dtype in _FLOATS:
            way = choose_way(tensor.nbytes, self._size)
        if memory is None or (way == "nccl" and not self._in_order):
            if not _is_dry_run():
                _finish(self._live().allreduce([tensor], self._sum))
            return tensor
        from octavo.parallel.triton.sums import sum_one_shot, sum_two_shot

        if way == "nccl":
            for piece in tensor.view(-1).split(two_shot_bytes(self._size) // tensor.itemsize):
                sum_two_shot(piece, memory)
        else:
            (sum_one_shot if way == "one-shot" else sum_two_shot)(tensor, memory)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order."""
        gathered = tensor.new_empty(self._size * tensor.shape[0], *tensor.shape[1:])
        if not _is_dry_run():
            _finish(self._live()._allgather_base(gathered, tensor, self._gather))
        return list(gathered.chunk(self._size))

    def memory_for(self, tensor: Tensor) -> SharedMemory | None:
        """See Collectives."""
        # In order, a step of any size has the same kernels.
        if self._in_order or self._memory is None:
            return None
        return self._memory if choose_way(tensor.nbytes, self._size) == "one-shot" else None

    def describe(self) -> str:
        """See Collectives."""
        if self._memory is None:
            return f"NCCL: {self._why_not}"
        return describe(self._size, in_order=self._in_order)

    def check_order(self) -> None:
        """Check that all sums have the order of ranks.

        Raises:
            ConfigError: the ranks share no memory.
        """
        if self._memory is None:
            raise ConfigError(
                "deterministic=True over several ranks needs GPUs that reach each other's memory: "
                f"{self._why_not}; use one rank, or deterministic=False"
            )

    def abort(self) -> None:
        """End the kernels that wait for other ranks. Idempotent.

        NCCL ends its kernels at once, but closes connections only when every CUDA graph that holds one is
        gone, and who calls this may hold them: see wait_for_end.
        """
        if self._memory is not None:
            self._memory.abort()
        group, self._group = self._group, None
        if group is not None:
            self._end = threading.Thread(target=group.abort, name="octavo-nccl-end", daemon=True)
            self._end.start()

    def wait_for_end(self, timeout_s: float) -> None:
        """See Collectives."""
        if self._end is not None:
            self._end.join(timeout_s)

    def share_memory(self, rank: int, device: torch.device, store: Any) -> None:
        """Map the memory of all ranks' GPUs, if every rank can; else all sums go through NCCL.

        Args:
            rank: this process' rank.
            device: of this rank, the current one.
            store: that the ranks met through.
        """
        memory, self._why_not = None, unsupported_reason(self._size, device) or ""
        if not self._why_not:
            try:
                memory = SharedMemory(rank, self._size, device, store)
            except RuntimeError as error:
                self._why_not = f"memory could not be mapped: {error}"
        # Of one mind: a rank that sums another way would wait for ever.
        if self.all_reduce(torch.full((1,), int(memory is not None), device=device)).item() == self._size:
            self._memory = memory
        elif not self._why_not:
            self._why_not = "another rank could not share its memory"

    def _live(self) -> Any:
        if self._group is None:
            raise PeerLostError("this rank has left the others")
        return self._group


def _finish(work: Any) -> None:
    """Let the current stream wait for an operation, unless it is on that stream anyway."""
    if work is not None:
        work.wait()


def _is_dry_run() -> bool:
    """Whether kernels are compiled and not run: ranks do that each for itself, some not at all."""
    from octavo.gpu.launch import is_dry_run

    return is_dry_run()


def connect_nccl(
    rank: int,
    size: int,
    device: torch.device,
    rendezvous: Path,
    *,
    shares_memory: bool = True,
    in_order: bool = False,
    timeout_s: float = 120.0,
) -> TensorParallel:
    """Meet the other ranks of this machine and return the handle.

    Args:
        rank: this process' rank.
        size: number of ranks.
        device: the GPU of this rank.
        rendezvous: path of a file that does not exist yet, the same for all ranks.
        shares_memory: sum small tensors over memory that the GPUs share, where they can.
        in_order: sum all tensors so, in the order of ranks.
        timeout_s: how long to wait for the others.

    Raises:
        UnsupportedModelError: this torch is built without NCCL.
        ConfigError: sums cannot have the order of ranks.
        PeerLostError: the ranks did not meet.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_nccl_available():
        raise UnsupportedModelError("tensor parallelism on GPUs needs a torch built with NCCL")
    # All ranks are on this machine, and nothing else may reach them.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Whoever starts ranks watches them. NCCL's own watch would look into the store, which is gone by then.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    api: Any = distributed
    try:
        store = api.FileStore(str(rendezvous), size)
        store.set_timeout(timedelta(seconds=timeout_s))
        options = api.ProcessGroupNCCL.Options()
        # Whoever starts ranks notices much earlier that one is gone.
        options._timeout = timedelta(days=30)
        with torch.cuda.device(device):
            group = api.ProcessGroupNCCL(store, rank, size, options)
            collectives = NcclCollectives(group, size, in_order=in_order)
            # NCCL connects at the first exchange of a kind, which must not be in a graph.
            met = collectives.all_reduce(torch.ones(1, device=device))
            collectives.all_reduce(torch.zeros(_LARGE_SUM, device=device))
            collectives.all_gather(met)
            torch.cuda.synchronize(device)
            if met.item() != size:
                raise PeerLostError(f"rank {rank} of {size} met ranks that add up to {met.item():g}")
            if shares_memory:
                collectives.share_memory(rank, device, store)
    except RuntimeError as error:
        raise PeerLostError(f"rank {rank} of {size} did not meet the others: {error}") from error
    if in_order:
        collectives.check_order()
    logger.info("sums over %d ranks: %s", size, collectives.describe())
    return TensorParallel(rank, size, collectives)
