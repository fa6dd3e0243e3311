"""Collectives on the GPUs of one machine: kernels over shared memory for small sums, NCCL for the rest.

All operations run on the current stream, so CUDA graphs capture them like any kernel. All ranks get the same
bits. NCCL's summation order depends on the size of the tensor; kernels over shared memory use rank order.
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
from octavo.parallel.all_reduce import choose_algorithm, describe, two_shot_bytes
from octavo.parallel.handle import PeerLostError, TensorParallel
from octavo.parallel.shared_memory import SharedMemory, unsupported_reason

logger = logging.getLogger(__name__)

# A sum of this many values makes NCCL allocate all the buffers that it will ever need.
_LARGE_SUM = 2**23
# How long the rendezvous of the ranks may take.
_RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
# Dtypes that the kernels over shared memory sum.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class NcclCollectives:
    """Collectives over a process group object. torch's global default group is not used."""

    def __init__(self, group: Any, size: int, *, in_order: bool = False) -> None:
        """Wrap a process group. Call `share_memory` afterwards to enable kernels over shared memory.

        Args:
            group: a connected process group.
            size: number of ranks.
            in_order: with shared memory, never sum floats by NCCL, so all sums use rank order.
        """
        from torch.distributed import distributed_c10d

        api: Any = distributed_c10d
        self._group = group
        self._size = size
        self._in_order = in_order
        self._end: threading.Thread | None = None
        self._memory: SharedMemory | None = None
        self._unsupported_reason = "as asked for"
        # Synchronous means: on the current stream, not on a stream of NCCL's own.
        self._sum, self._gather = api.AllreduceOptions(), api.AllgatherOptions()
        self._sum.asyncOp = self._gather.asyncOp = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it."""
        memory = self._memory
        if memory is None or tensor.dtype not in _FLOATS:
            return self._sum_by_nccl(tensor)
        algorithm = choose_algorithm(tensor.nbytes, self._size)
        if algorithm == "nccl" and not self._in_order:
            return self._sum_by_nccl(tensor)
        from octavo.parallel.triton.sums import sum_one_shot, sum_two_shot

        if algorithm == "nccl":
            for piece in tensor.view(-1).split(two_shot_bytes(self._size) // tensor.itemsize):
                sum_two_shot(piece, memory)
        else:
            (sum_one_shot if algorithm == "one-shot" else sum_two_shot)(tensor, memory)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order."""
        gathered = tensor.new_empty(self._size * tensor.shape[0], *tensor.shape[1:])
        if not _is_dry_run():
            _finish(self._live()._allgather_base(gathered, tensor, self._gather))
        return list(gathered.chunk(self._size))

    def memory_for(self, tensor: Tensor) -> SharedMemory | None:
        """See Collectives."""
        # Sums in order use the same kernels for steps of any size.
        if self._in_order or self._memory is None:
            return None
        return self._memory if choose_algorithm(tensor.nbytes, self._size) == "one-shot" else None

    def describe(self) -> str:
        """See Collectives."""
        if self._memory is None:
            return f"NCCL: {self._unsupported_reason}"
        return describe(self._size, in_order=self._in_order)

    def check_order(self) -> None:
        """Check that all sums use rank order.

        Raises:
            ConfigError: the ranks share no memory.
        """
        if self._memory is None:
            raise ConfigError(
                "deterministic=True over several ranks needs GPUs that reach each other's memory: "
                f"{self._unsupported_reason}; use one rank, or deterministic=False"
            )

    def abort(self) -> None:
        """Abort the kernels that wait for other ranks. Idempotent.

        NCCL aborts its kernels at once. It closes connections only after every CUDA graph that uses them is
        destroyed, and the caller may hold such graphs: see wait_for_end.
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
        """Map the memory of all GPUs if every rank can. Otherwise NCCL does all sums.

        Args:
            rank: this process' rank.
            device: of this rank, the current one.
            store: the store of the process group.
        """
        memory, self._unsupported_reason = None, unsupported_reason(self._size, device) or ""
        if not self._unsupported_reason:
            try:
                memory = SharedMemory(rank, self._size, device, store)
            except RuntimeError as error:
                self._unsupported_reason = f"memory could not be mapped: {error}"
        # All ranks must agree: a rank that sums differently would wait forever.
        if self.all_reduce(torch.full((1,), int(memory is not None), device=device)).item() == self._size:
            self._memory = memory
        elif not self._unsupported_reason:
            self._unsupported_reason = "another rank could not share its memory"

    def _sum_by_nccl(self, tensor: Tensor) -> Tensor:
        if not _is_dry_run():
            _finish(self._live().allreduce([tensor], self._sum))
        return tensor

    def _live(self) -> Any:
        if self._group is None:
            raise PeerLostError("this rank has left the others")
        return self._group


def _finish(work: Any) -> None:
    """Make the current stream wait for an operation, unless it runs on that stream."""
    if work is not None:
        work.wait()


def _is_dry_run() -> bool:
    """Whether kernels are compiled but not run. Ranks do that independently, so they must not communicate."""
    from octavo.kernels.launch import is_dry_run

    return is_dry_run()


def connect_nccl(
    rank: int,
    size: int,
    device: torch.device,
    rendezvous: Path,
    *,
    shares_memory: bool = True,
    in_order: bool = False,
) -> TensorParallel:
    """Connect to the other ranks of this machine; see connect for the arguments.

    Raises:
        UnsupportedModelError: this build of torch has no NCCL.
        ConfigError: sums in rank order are impossible here.
        PeerLostError: the ranks did not connect.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_nccl_available():
        raise UnsupportedModelError("tensor parallelism on GPUs needs a torch built with NCCL")
    # Loopback only: all ranks are on this machine, and nobody else may connect.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # engine/ranks watches the ranks. NCCL's own monitor would need the store, which is gone by then.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    try:
        with torch.cuda.device(device):
            store, group = _rendezvous(rank, size, rendezvous)
            collectives = NcclCollectives(group, size, in_order=in_order)
            # NCCL connects lazily at the first call of each kind, which must not happen in a graph.
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


def _rendezvous(rank: int, size: int, rendezvous: Path) -> tuple[Any, Any]:
    """Build the store through which ranks find each other, and the process group on the current GPU."""
    from torch import distributed

    api: Any = distributed
    store = api.FileStore(str(rendezvous), size)
    store.set_timeout(_RENDEZVOUS_TIMEOUT)
    options = api.ProcessGroupNCCL.Options()
    # engine/ranks notices much earlier that a rank is gone.
    options._timeout = timedelta(days=30)
    return store, api.ProcessGroupNCCL(store, rank, size, options)
