"""`octavo collect-env`: what a bug report should say about the machine."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

from octavo.cli.settings import PREFIX

_PACKAGES = (
    "octavo torch triton numpy tokenizers safetensors msgspec jinja2 llguidance prompt-toolkit starlette "
    "granian prometheus-client opentelemetry-sdk transformers"
)
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "XDG_CACHE_HOME")


def run_collect_env() -> None:
    """Print the machine, the versions and the environment; a key shows only that it is set."""
    for name, value in (*_machine(), *_devices(), *_versions(), *_variables()):
        print(f"{name}: {value}")


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, {platform.machine()}"
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{pages * page_bytes / 2**30:.1f} GiB"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    yield "threads of torch", str(torch.get_num_threads())
    yield "CPU instructions", torch.backends.cpu.get_cpu_capability()
    yield "CUDA of torch", str(torch.version.cuda)
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        size = f"{found.total_memory / 2**30:.1f} GiB"
        yield f"GPU {index}", f"{found.name}, {size}, compute capability {found.major}.{found.minor}"


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES.split():
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


def _variables() -> Iterator[tuple[str, str]]:
    for name in sorted(os.environ):
        if name.startswith(PREFIX) or name in _VARIABLES:
            yield name, "(not shown)" if "KEY" in name else os.environ[name]
