"""The tensor-parallel handle, passed to every layer that needs it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from octavo.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from octavo.parallel.shared_memory import SharedMemory


class PeerLostError(EngineError):
    """A collective failed because another rank ended. Only that rank or its parent knows why."""


class Collectives(Protocol):
    """The collectives of a group of ranks. All ranks make the same calls in the same order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order. All have the shape of `tensor`."""
        ...

    def memory_for(self, tensor: Tensor) -> "SharedMemory | None":
        """Return shared memory for a kernel that sums `tensor` itself; None: call all_reduce."""
        ...

    def describe(self) -> str:
        """Describe for people how tensors are summed."""
        ...

    def abort(self) -> None:
        """Abort collectives in other threads and start to close all connections. Idempotent."""
        ...

    def wait_for_end(self, timeout_s: float) -> None:
        """After abort, wait until all connections are closed. CUDA graphs with collectives delay that."""
        ...


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank of a tensor-parallel group. The default is a single rank, which costs nothing.

    Attributes:
        rank: 0 <= rank < size.
        size: number of ranks.
        group: the collectives; None exactly when size is 1.

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
        """Return a rank for planning only, without connections."""
        return cls(rank, size, _NotMet() if size > 1 else None)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` (any shape, contiguous) over all ranks in place, and return it."""
        return tensor if self.group is None else self.group.all_reduce(tensor)

    def memory_for(self, tensor: Tensor) -> "SharedMemory | None":
        """Return shared memory for a kernel that sums `tensor` itself; None: call all_reduce."""
        return None if self.group is None else self.group.memory_for(tensor)

    def describe(self) -> str:
        """Describe for people how tensors are summed; empty for a single rank."""
        return "" if self.group is None else self.group.describe()

    def abort(self) -> None:
        """Leave the group: pending collectives end, and later ones fail. Idempotent."""
        if self.group is not None:
            self.group.abort()

    def wait_for_end(self, timeout_s: float) -> None:
        """After abort, wait until all connections are closed. CUDA graphs with collectives delay that."""
        if self.group is not None:
            self.group.wait_for_end(timeout_s)

    def all_gather_last_dim(self, tensor: Tensor) -> Tensor:
        """Concatenate the [..., n] tensors of all ranks to [..., size * n], in rank order."""
        if self.group is None:
            return tensor
        parts = self.group.all_gather(tensor.contiguous())
        gathered = tensor.new_empty(*tensor.shape[:-1], self.size, tensor.shape[-1])
        for rank, part in enumerate(parts):
            gathered[..., rank, :] = part
        return gathered.flatten(-2)


class _NotMet:
    """Collectives of a rank that is not connected."""

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
        """See Collectives: nothing is pending."""

    def wait_for_end(self, timeout_s: float) -> None:
        """See Collectives."""
