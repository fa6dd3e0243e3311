"""GPU memory that the kernels of all ranks on one machine read and write.

Each rank allocates one block, and all ranks map it:

    flags      [2 barriers, programs, ranks] int32: the last sum for which a rank's program reached a barrier
    halves     two buffers of values; sums alternate between them

The halves need no further synchronization. A rank that writes to a half for sum k + 2 has finished sum k + 1.
All ranks had reached the barrier of sum k + 1 by then, so they had finished sum k and no longer read its
values. The device counts the sums, so CUDA graphs may replay them in any order that all ranks share.
"""

import weakref
from typing import Any

import torch

from octavo.kernels import driver
from octavo.kernels.device import triton_unsupported_reason
from octavo.parallel.all_reduce import MAX_RANKS

MAX_PROGRAMS = 256
"""Most programs of a summing kernel. All must be resident on the GPU at once, as they wait for each other."""
FLAG_BYTES = 2 * MAX_PROGRAMS * MAX_RANKS * 4
HALF_BYTES = 2**25
SHARED_BYTES = FLAG_BYTES + 2 * HALF_BYTES
"""Size of each rank's block."""


class SharedMemory:
    """What a kernel needs in order to sum over ranks.

    Attributes:
        rank: this process' rank.
        size: number of ranks.
        table: [size + 1] int64 on the GPU: the address of each rank's block, and of a word on the host that
            stops all waiting once it is not 0.
        count: [MAX_PROGRAMS] int32 on the GPU: sums so far, one copy for each program of a kernel.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        """Allocate this rank's block and map the blocks of all others.

        Args:
            rank: this process' rank.
            size: number of ranks.
            device: of this rank, the current one.
            store: through which the ranks exchange memory handles.

        Raises:
            RuntimeError: a rank could not allocate its block, or a block could not be mapped.
        """
        self.rank, self.size = rank, size
        self.count = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._gone = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        blocks: dict[int, int] = {}
        # At process exit the operating system frees the memory.
        weakref.finalize(self, _free, device, rank, blocks).atexit = False
        _exchange(rank, size, store, blocks)
        addresses = [*(blocks[other] for other in range(size)), self._gone.data_ptr()]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)

    @property
    def one_shot_bytes(self) -> int:
        """Size in bytes of the largest tensor that fits into one half for all ranks."""
        return HALF_BYTES // self.size

    def abort(self) -> None:
        """Release kernels that wait for another rank; their sums are garbage. Idempotent."""
        self._gone.fill_(1)


def unsupported_reason(size: int, device: torch.device) -> str | None:
    """Return why the ranks' GPUs cannot share memory, or None if they can."""
    if size > MAX_RANKS:
        return f"at most {MAX_RANKS} ranks share memory"
    reason = triton_unsupported_reason(device.type)
    if reason is not None:
        return f"the kernels need Triton: {reason}"
    if torch.cuda.device_count() < size:
        return f"there are {torch.cuda.device_count()} GPUs"
    for other in range(size):
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"{device} cannot reach the memory of cuda:{other}"
    return None


def _exchange(rank: int, size: int, store: Any, blocks: dict[int, int]) -> None:
    """Fill `blocks`: rank -> address of its block. A block is zeroed before others map it."""
    try:
        blocks[rank] = driver.allocate(SHARED_BYTES)
        store.set(f"memory/{rank}", driver.export(blocks[rank]).hex())
    except RuntimeError:
        # No other rank may wait for this one.
        store.set(f"memory/{rank}", "none")
        raise
    for other in range(size):
        said = store.get(f"memory/{other}").decode()
        if said == "none":
            raise RuntimeError(f"rank {other} has no memory to share")
        if other != rank:
            blocks[other] = driver.open_handle(bytes.fromhex(said))


def _free(device: torch.device, rank: int, blocks: dict[int, int]) -> None:
    with torch.cuda.device(device):
        for other, address in blocks.items():
            (driver.free if other == rank else driver.close_handle)(address)
