"""Memory on each GPU that the kernels of all ranks on one machine read and write.

Every rank has one block of it, mapped by all:

    flags      [2 meetings, programs, ranks] int32: the last sum for which a rank's program came to a meeting
    halves     two areas of values; sums alternate between them

A rank that writes to a half for sum k + 2 has ended sum k + 1, for which all others had come to its meeting,
so they had ended sum k: nobody still reads what sum k left. Sums are counted on the device, so that CUDA
graphs may replay them in any order that is the same on all ranks.
"""

import weakref
from typing import Any

import torch

from octavo.gpu import driver
from octavo.gpu.device import triton_unsupported_reason
from octavo.parallel.choice import MAX_RANKS

MAX_PROGRAMS = 256
"""Programs of a kernel that sums: few enough to be on the GPU all at once, as they wait for one another."""
FLAG_BYTES = 2 * MAX_PROGRAMS * MAX_RANKS * 4
HALF_BYTES = 2**25
SHARED_BYTES = FLAG_BYTES + 2 * HALF_BYTES
"""Of each rank."""


class SharedMemory:
    """What a kernel needs to sum over ranks.

    Attributes:
        rank: this process' rank.
        size: number of ranks.
        table: [size + 1] int64 on the GPU: addresses of each rank's block, and of a word on the host that
            ends all waiting once it is not 0.
        count: [MAX_PROGRAMS] int32 on the GPU: sums so far; each program of a kernel reads its own copy.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        """Allocate this rank's block and map those of all others.

        Args:
            rank: this process' rank.
            size: number of ranks.
            device: of this rank, the current one.
            store: through which the ranks tell each other what to map.

        Raises:
            RuntimeError: a rank could not allocate its block, or one could not be mapped.
        """
        self.rank, self.size = rank, size
        self.count = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._gone = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        blocks: dict[int, int] = {}
        # For a process that ends, the operating system does it.
        weakref.finalize(self, _free, device, rank, blocks).atexit = False
        _exchange(rank, size, store, blocks)
        addresses = [*(blocks[other] for other in range(size)), self._gone.data_ptr()]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)

    @property
    def one_shot_bytes(self) -> int:
        """Most bytes of a tensor of which every rank can send all to all."""
        return HALF_BYTES // self.size

    def abort(self) -> None:
        """Let kernels that wait for another rank end; what they sum is worthless. Idempotent."""
        self._gone.fill_(1)


def unsupported_reason(size: int, device: torch.device) -> str | None:
    """Say why the ranks' GPUs cannot share memory; None: they can."""
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
    """Fill in the addresses of all ranks' blocks, by rank. What others map is zero already."""
    try:
        blocks[rank] = driver.allocate(SHARED_BYTES)
        store.set(f"memory/{rank}", driver.export(blocks[rank]).hex())
    except RuntimeError:
        # Let nobody wait for it.
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
