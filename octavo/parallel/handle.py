"""The tensor-parallel handle, which every layer that needs it gets as an argument."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from octavo.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from octavo.parallel.shared_memory import SharedMemory


class PeerLostError(EngineError):
    """A collective or a meeting failed, as another rank ended: why, only that one or its parent can say."""


class Collectives(Protocol):
    """The collectives of a group of ranks; all ranks make the same calls in the same order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; all have the shape of `tensor`."""
        ...

    def memory_for(self, tensor: Tensor) -> "SharedMemory | None":
        """Return the memory by which a kernel can sum a tensor in one shot, or None: all_reduce has to."""
        ...

    def describe(self) -> str:
        """Say for people how tensors are summed."""
        ...

    def abort(self) -> None:
        """End collectives under way in other threads, and begin to close all connections. Idempotent."""
        ...

    def wait_for_end(self, timeout_s: float) -> None:
        """After abort, wait until all connections are closed: CUDA graphs of collectives prevent that."""
        ...


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank of a tensor-parallel group; the default is the only rank, and costs nothing.

    Attributes:
        rank: 0 <= rank < size.
        size: number of ranks.
        group: what ranks communicate by; None exactly when size is 1.

    Raises:
        ConfigError: rank, size and group contradict one another.
    """

    rank: int = 0
    size: int = 1
    group: Collectives | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"rank must be in [0, size), got rank={self.rank}, size={self.size}")
        if (self.group is None) != (self.size == 1):
            raise ConfigError(f"a group is needed exactly when size > 1, got size={self.size}")

    @classmethod
    def not_met(cls, rank: int, size: int) -> "TensorParallel":
        """Return a rank that can be planned for, but that has not met the others."""
        return cls(rank, size, _NotMet() if size > 1 else None)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` (any shape, contiguous) over all ranks, in place; returns it."""
        return tensor if self.group is None else self.group.all_reduce(tensor)

    def memory_for(self, tensor: Tensor) -> "SharedMemory | None":
        """Return the memory by which a kernel can itself sum a tensor over ranks; None: all_reduce has to."""
        return None if self.group is None else self.group.memory_for(tensor)

    def describe(self) -> str:
        """Say for people how tensors are summed over ranks; empty for a single one."""
        return "" if self.group is None else self.group.describe()

    def abort(self) -> None:
        """Leave the other ranks: what waits for them ends, nothing more can be exchanged. Idempotent."""
        if self.group is not None:
            self.group.abort()

    def wait_for_end(self, timeout_s: float) -> None:
        """After abort, wait until all connections are closed: CUDA graphs of collectives prevent that."""
        if self.group is not None:
            self.group.wait_for_end(timeout_s)

    def all_gather_last_dim(self, tensor: Tensor) -> Tensor:
        """Join every rank's [..., n] tensor to [..., size * n], in rank order."""
        if self.group is None:
            return tensor
        parts = self.group.all_gather(tensor.contiguous())
        gathered = tensor.new_empty(*tensor.shape[:-1], self.size, tensor.shape[-1])
        for rank, part in enumerate(parts):
            gathered[..., rank, :] = part
        return gathered.flatten(-2)


class _NotMet:
    """Collectives of a rank that is alone so far."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Collectives."""
        raise EngineError("this rank has not met the others")

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See Collectives."""
        raise EngineError("this rank has not met the others")

    def memory_for(self, tensor: Tensor) -> None:
        """See Collectives."""

    def describe(self) -> str:
        """See Collectives."""
        return "not met"

    def abort(self) -> None:
        """See Collectives: nothing is under way."""

    def wait_for_end(self, timeout_s: float) -> None:
        """See Collectives."""
