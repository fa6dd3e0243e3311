"""How the ranks of one machine meet: through gloo on CPUs, through NCCL on NVIDIA GPUs."""

from pathlib import Path

import torch

from octavo.parallel.gloo import connect_gloo
from octavo.parallel.handle import TensorParallel


def expected_sums(size: int, device: torch.device, *, shares_memory: bool, in_order: bool = False) -> str:
    """Say for people how ranks would sum, without meeting them.

    Args:
        size: number of ranks, more than one.
        device: where a rank computes.
        shares_memory, in_order: see connect.
    """
    if device.type == "cpu":
        return "gloo"
    from octavo.parallel.choice import describe
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
    """Meet the other ranks of this machine and return the handle.

    Args:
        rank: this process' rank.
        size: number of ranks.
        device: where this rank computes.
        rendezvous: path of a file that does not exist yet, the same for all ranks.
        shares_memory: GPUs sum small tensors over memory that they share, where they can.
        in_order: every sum has the order of ranks, so a row's bits do not depend on the number of rows. CPUs
            always sum so.

    Raises:
        UnsupportedModelError: this torch is built without what the device needs.
        ConfigError: sums cannot have the order of ranks.
        PeerLostError: the ranks did not meet in time.
    """
    if device.type == "cpu":
        return connect_gloo(rank, size, rendezvous)
    from octavo.parallel.nccl import connect_nccl

    return connect_nccl(rank, size, device, rendezvous, shares_memory=shares_memory, in_order=in_order)
