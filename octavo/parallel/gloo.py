"""Collectives over gloo: tensor parallelism on CPUs, which is mostly for tests."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.parallel.handle import PeerLostError, TensorParallel

# Timeout of a collective. engine/ranks notices much earlier that a rank is gone. With a long timeout, ranks
# that were all stopped for an hour can continue.
_EXCHANGE_TIMEOUT = timedelta(days=30)


class GlooCollectives:
    """Collectives over a process group object. torch's global default group is not used."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it. Sums in float32 or wider, in rank order.

        gloo's own all-reduce starts at a different rank in each part of the tensor, so the bits of a row
        would depend on the number of rows.
        """
        parts = self.all_gather(tensor)
        total = parts[0].to(torch.promote_types(tensor.dtype, torch.float32))
        for part in parts[1:]:
            total += part
        return tensor.copy_(total)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order."""
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self._run(lambda group: group.allgather([parts], [tensor]))
        return parts

    def memory_for(self, tensor: Tensor) -> None:
        """See Collectives: ranks on CPUs share no memory."""

    def describe(self) -> str:
        """See Collectives."""
        return "gloo"

    def abort(self) -> None:
        """Close the connections. Collectives that wait for a dead process fail by themselves."""
        self._group = None

    def wait_for_end(self, timeout_s: float) -> None:
        """See Collectives."""

    def _run(self, begin: Callable[[Any], Any]) -> None:
        group = self._group
        if group is None:
            raise PeerLostError("this rank has left the others")
        try:
            begin(group).wait()
        except RuntimeError as error:
            raise PeerLostError(f"an exchange with the other ranks failed: {error}") from error


def connect_gloo(rank: int, size: int, rendezvous: Path, *, timeout_s: float = 60.0) -> TensorParallel:
    """Connect to the other ranks of this machine.

    Args:
        rank: this process' rank.
        size: number of ranks; a single rank connects to nothing.
        rendezvous: path of a file that does not exist yet, the same for all ranks. gloo exchanges its ports
            through it.
        timeout_s: how long to wait for the other ranks.

    Raises:
        UnsupportedModelError: this build of torch has no gloo.
        PeerLostError: the ranks did not connect in time.
    """
    if size == 1:
        return TensorParallel()
    # A single rank never imports torch.distributed.
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise UnsupportedModelError("tensor parallelism on a CPU needs a torch built with gloo")
    try:
        group = _meet(rank, size, rendezvous, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank} of {size} did not meet the others at {rendezvous}: {error}"
        ) from error
    return TensorParallel(rank, size, GlooCollectives(group, size))


def _meet(rank: int, size: int, rendezvous: Path, timeout: timedelta) -> Any:
    """Build the process group. torch has no type stubs for most of this, hence Any."""
    from torch import distributed

    api: Any = distributed
    store = api.FileStore(str(rendezvous), size)
    store.set_timeout(timeout)
    options = api.ProcessGroupGloo._Options()
    # Loopback only: all ranks are on this machine, and nobody else may connect.
    options._devices = [api.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    group = api.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_EXCHANGE_TIMEOUT)
    return group
