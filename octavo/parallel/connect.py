"""Connects the ranks of one machine: gloo on CPUs, NCCL on NVIDIA GPUs."""

from pathlib import Path

import torch

from octavo.parallel.gloo import connect_gloo
from octavo.parallel.handle import TensorParallel


def expected_sums(size: int, device: torch.device, *, shares_memory: bool, in_order: bool = False) -> str:
    """Describe for people how ranks would sum, without connecting them.

    Args:
        size: number of ranks, more than one.
        device: of a rank.
        shares_memory, in_order: see connect.
    """
    if device.type == "cpu":
        return "gloo"
    from octavo.parallel.all_reduce import describe
    from octavo.parallel.shared_memory import unsupported_reason

    reason = unsupported_reason(size, device) if shares_memory else "as asked for"
    return describe(size, in_order=in_order) if reason is None else f"NCCL: {reason}"


def connect(
    rank: int,
    size: int,
    device: torch.device,
    rendezvous: Path,
    *,
    shares_memory: bool = True,
    in_order: bool = False,
) -> TensorParallel:
    """Connect to the other ranks of this machine.

    Args:
        rank: this process' rank.
        size: number of ranks.
        device: of this rank.
        rendezvous: path of a file that does not exist yet, the same for all ranks.
        shares_memory: GPUs sum small tensors through shared memory where possible.
        in_order: always sum in rank order, so that a row's bits do not depend on the number of rows. CPUs
            always do.

    Raises:
        UnsupportedModelError: this build of torch lacks the backend.
        ConfigError: sums in rank order are impossible here.
        PeerLostError: the ranks did not connect in time.
    """
    if device.type == "cpu":
        return connect_gloo(rank, size, rendezvous)
    from octavo.parallel.nccl import connect_nccl

    return connect_nccl(rank, size, device, rendezvous, shares_memory=shares_memory, in_order=in_order)
