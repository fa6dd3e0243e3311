"""Which device a rank runs on, and how much memory is free there."""

import os
from pathlib import Path

import torch

from octavo.errors import ConfigError, OutOfMemoryError
from octavo.parallel import TensorParallel


def device_of(name: str, parallel: TensorParallel) -> torch.device:
    """Return the device that a name stands for on one rank.

    Raises:
        ConfigError: there is none of this name, or CUDA_VISIBLE_DEVICES hides all GPUs by a mistake.
    """
    if name == "auto":
        name = _best_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and parallel.size > 1:
        return _device_of_rank(device, parallel)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} asked for, but torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _best_device() -> str:
    """Return "cuda" if there is a GPU, else "cpu": but not if somebody asked for GPUs by wrong names.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names GPUs, this machine has some, and torch sees none.
    """
    if torch.cuda.is_available():
        return "cuda"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
    if visible not in ("", "-1") and torch.version.cuda is not None and has_gpus:
        raise ConfigError(
            f"torch sees none of this machine's GPUs with CUDA_VISIBLE_DEVICES={visible!r}; name some that "
            "there are, each once, or ask for device='cpu'"
        )
    return "cpu"


def _device_of_rank(device: torch.device, parallel: TensorParallel) -> torch.device:
    """Return the rank-th of the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    if device.index is not None:
        raise ConfigError(
            f"device must be auto or cuda where {parallel.size} ranks have a GPU each, got '{device}'; "
            "CUDA_VISIBLE_DEVICES says which GPUs, and in which order"
        )
    if not torch.cuda.is_available():
        raise ConfigError("device 'cuda' asked for, but torch sees no CUDA device")
    return torch.device("cuda", parallel.rank)


def require_devices(device: torch.device, parallel: TensorParallel) -> None:
    """Check that each rank has a GPU of its own, if it needs one.

    Raises:
        ConfigError: there are fewer.
    """
    count = torch.cuda.device_count()
    if device.type == "cuda" and count < parallel.size:
        raise ConfigError(f"tensor_parallel_size={parallel.size} needs as many GPUs, but torch sees {count}")


def free_memory_bytes(device: torch.device) -> int:
    """Return the memory that a new process could take on the device, beside the other processes.

    Raises:
        OutOfMemoryError: a GPU is so full that this process cannot even ask.
    """
    if device.type == "cuda":
        try:
            return torch.cuda.mem_get_info(device)[0]
        except RuntimeError as error:
            message = f"{device} is full: there is no memory for a process's CUDA context"
            raise OutOfMemoryError(f"{message} ({str(error).splitlines()[0]})") from error
    return min(_available_system_bytes(), _free_cgroup_bytes())


def free_bytes_of(device: torch.device, parallel: TensorParallel) -> int:
    """Return the memory one rank may take. A rank whose GPU is missing is planned as if it had the first."""
    if device.type == "cpu":
        return free_memory_bytes(device) // parallel.size
    is_here = (device.index or 0) < torch.cuda.device_count()
    return free_memory_bytes(device if is_here else torch.device("cuda", 0))


def _available_system_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_cgroup_bytes() -> int:
    """Return the free memory of this process's cgroup: a container may have less than its machine."""
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if not limit.exists() or not used.exists() or limit.read_text().strip() == "max":
        return 2**63
    return max(0, int(limit.read_text()) - int(used.read_text()))
