"""Installs the build of PyTorch that this machine can use, as constraints.txt pins it, into this Python.

    python deploy/install_torch.py           that for CPUs where Linux has no NVIDIA GPU, else pip's choice
    python deploy/install_torch.py URL       from this index, whatever the machine has
    python deploy/install_torch.py default   pip's choice: from the package index, on Linux with CUDA

Only torch comes from PyTorch's index: what it needs comes with Octavo, from where pip finds packages.
"""

import contextlib
import http.client
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from importlib import metadata
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
# Looking at the index may take this long, over all of its addresses.
LOOK_S = 15
CUDA_SIZES = "2.8 GB to download and 5.6 GB on disk, in 5 to 15 minutes"
CPU_SIZES = "0.2 GB to download and 0.8 GB on disk, in about a minute"


def main() -> int:
    """Install PyTorch unless it is there; return pip's exit code."""
    index = sys.argv[1] if len(sys.argv) > 1 else "auto"
    version = pinned_version()
    if installed_version().partition("+")[0] == version:
        return 0
    if index == "auto":
        index = choose_index(version)
    else:
        say(f"PyTorch {version} from {index.replace('default', 'the package index')}, as TORCH_INDEX says.")
    return subprocess.run([sys.executable, "-m", "pip", *pip_arguments(index)], check=False).returncode


def pip_arguments(index: str) -> list[str]:
    """Return what pip is told: of an index beside its own it takes torch alone."""
    own = [] if index == "default" else ["--no-deps", "--index-url", index]
    return ["install", "--disable-pip-version-check", "-c", str(CONSTRAINTS), *own, "torch"]


def pinned_version() -> str:
    """Return the version of torch in constraints.txt."""
    (version,) = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    return version


def installed_version() -> str:
    """Return the version of torch in this Python, or nothing."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return ""


def choose_index(version: str) -> str:
    """Return the index of builds for CPUs, or "default"; say why, and what it will take."""
    if sys.platform != "linux":
        say(f"PyTorch {version} for {platform.system()}.")
        return "default"
    if has_nvidia_gpu():
        say(f"PyTorch {version} with CUDA, as there is an NVIDIA GPU: {CUDA_SIZES}.")
        return "default"
    if (problem := why_not(CPU_INDEX, version)) is None:
        say(f"PyTorch {version} for CPUs, as there is no NVIDIA GPU, from {CPU_INDEX}: {CPU_SIZES}.")
        return CPU_INDEX
    say(
        f"NOTE: {CPU_INDEX}, where PyTorch's builds for CPUs are, {problem}. "
        f"pip takes PyTorch {version} from where it finds packages here. That is mostly the build with CUDA: "
        f"{CUDA_SIZES}, most of it for nothing on this machine. "
        "Another index of builds for CPUs: make demo TORCH_INDEX=URL"
    )
    return "default"


def has_nvidia_gpu() -> bool:
    """Ask NVIDIA's driver, which lists its GPUs; under WSL only its tool does."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    tool = shutil.which("nvidia-smi")
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False) if tool else None
    return listed is not None and listed.returncode == 0 and "GPU " in listed.stdout


def why_not(index: str, version: str) -> str | None:
    """Tell why an index cannot give this Python a build of torch; None if it can."""
    try:
        names = read_within(LOOK_S, f"{index}/torch/")
    except (OSError, http.client.HTTPException) as error:
        return f"cannot be reached ({getattr(error, 'reason', None) or error})"
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = rf"torch-{re.escape(version)}(%2B|\+)?\w*-{tag}-{tag}-\w*linux\w*_{platform.machine()}\.whl"
    return None if re.search(wheel, names) else f"has no {version} for {tag} on {platform.machine()}"


def read_within(seconds: float, url: str) -> str:
    """Read a page in a thread, as a host has many addresses, each of which may keep silent, and so may names.

    Raises:
        OSError: the page cannot be had, or not in time.
        http.client.HTTPException: the answer is broken.
    """
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def read() -> None:
        try:
            with urllib.request.urlopen(url, timeout=seconds) as page:
                answers.put(page.read().decode(errors="replace"))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=read, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def say(text: str) -> None:
    """Print a sentence before pip prints its own."""
    print(f"octavo: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
