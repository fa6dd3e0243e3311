"""Each replica's share of the machine: its own GPUs, and an equal part of the CPU cores."""

import os
from itertools import takewhile
from pathlib import Path

from octavo.errors import ConfigError


def take_share(device: str, index: int, num_replicas: int, num_gpus: int, *, dry: bool = False) -> None:
    """Set the environment variables that give this process its share. Call it before importing PyTorch.

    Args:
        device: the engine's option.
        index: of this replica.
        num_replicas: replicas on this machine.
        num_gpus: GPUs of each replica: tensor_parallel_size.
        dry: only check that the share exists.

    Raises:
        ConfigError: there are fewer GPUs than replicas need, CUDA_VISIBLE_DEVICES names one twice, or the
            device is one GPU.
    """
    found = share_of(device, index, num_replicas, num_gpus, _gpus(), _num_cores())
    if not dry:
        # A thread count that the user sets applies to each replica.
        threads = os.environ.get("OMP_NUM_THREADS", found["OMP_NUM_THREADS"])
        os.environ.update({**found, "OMP_NUM_THREADS": threads})


def share_of(
    device: str, index: int, num_replicas: int, num_gpus: int, gpus: list[str], num_cores: int
) -> dict[str, str]:
    """Return the environment variables of one replica.

    Args:
        device, index, num_replicas, num_gpus: as take_share.
        gpus: GPUs of the machine, named as in CUDA_VISIBLE_DEVICES.
        num_cores: CPU cores that this process may use.

    Raises:
        ConfigError: as take_share.
    """
    if device.startswith("cuda:"):
        raise ConfigError(f"each replica takes GPUs of its own: device must be cuda or auto, got {device!r}")
    variables = {"OMP_NUM_THREADS": str(max(1, num_cores // num_replicas))}
    if device == "cpu" or (device == "auto" and not gpus):
        return variables
    if len(gpus) < num_replicas * num_gpus:
        raise ConfigError(
            f"replicas={num_replicas} of tensor_parallel_size={num_gpus} need {num_replicas * num_gpus} "
            f"GPUs, there are {len(gpus)}"
        )
    own = gpus[index * num_gpus : (index + 1) * num_gpus]
    return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def named_gpus(visible: str) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names. Like CUDA, stop at the first invalid name.

    Raises:
        ConfigError: a GPU is named twice; CUDA would then hide all of them.
    """
    names = [name.strip() for name in visible.split(",")]
    found = list(takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), names))
    if len(set(found)) < len(found):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible!r} names a GPU twice; name each once")
    return found


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return named_gpus(visible)
    # Asking CUDA would initialize it in a process that forks.
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
