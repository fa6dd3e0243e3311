"""Compile C kernels on first use, into a folder that only the user can write to."""

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.own_files import make_own_folder, opened_own
from octavo.patience import communicate

# Compiling takes two seconds on an idle machine. The first limit is for a compiler that makes no progress.
_IDLE_S, _BUSY_S = 120.0, 600.0
_FOLDER = Path(__file__).parent
_CPUINFO = Path("/proc/cpuinfo")
# The fields of /proc/cpuinfo that compiled code depends on, on x86 and on Arm.
_CPU_FACTS = ("model name", "flags", "CPU implementer", "CPU variant", "CPU part", "Features")

# No -ffast-math, and none of its flags that assume finite numbers: the score of a masked key is -inf.
FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)


class KernelUnavailableError(Exception):
    """The kernels cannot be compiled or loaded here; the message says why. Callers catch it."""


@dataclass(frozen=True, slots=True)
class Library:
    """C files that become one shared library.

    Attributes:
        name: beginning of the compiled file's name.
        sources: files to compile.
        included: files that they include.
    """

    name: str
    sources: tuple[Path, ...]
    included: tuple[Path, ...]


# Files that libraries of several rooms include.
TOOLS = (_FOLDER / "team.h", _FOLDER / "vector.c")


def load_library(library: Library) -> ctypes.CDLL:
    """Load the compiled kernels from the cache folder; compile them first (about 2 s) if they are not there.

    Raises:
        KernelUnavailableError: there is no compiler, it failed, or the cache folder is not safe.
    """
    folder = cache_folder()
    _check_folder(folder)
    # CC may have arguments, as in "ccache gcc".
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    path = folder / f"{library.name}-{_fingerprint(compiler, library)}.so"
    try:
        if not path.exists():
            _compile(compiler, library, path)
        with opened_own(path):
            return _load(path)
    except OSError as error:
        raise KernelUnavailableError(f"the cache folder {folder} cannot be used ({error})") from error
    except ConfigError as error:
        raise KernelUnavailableError(str(error)) from error


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailableError(f"{path} does not load ({error}); delete it to compile again") from error


def cache_folder() -> Path:
    """Return the folder for compiled kernels: $XDG_CACHE_HOME/octavo or ~/.cache/octavo."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "octavo"


def openmp_library() -> Path | None:
    """Return the OpenMP runtime that ships with torch, or None if torch uses the system's.

    A second runtime in the process would have its own pool of spinning threads, and slow both down.
    Intel's and LLVM's runtimes have GNU's entry points too.
    """
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.with_name("torch.libs")):
        for pattern in ("libgomp*.so*", "libiomp5.so", "libomp.so"):
            for path in sorted(folder.glob(pattern)):
                return path
    return None


def _check_folder(folder: Path) -> None:
    """Create the folder with mode 0700; refuse one that others could have put a library into."""
    try:
        make_own_folder(folder)
    except OSError as error:
        raise KernelUnavailableError(f"the cache folder {folder} cannot be made ({error})") from error
    except ConfigError as error:
        raise KernelUnavailableError(f"the cache folder {error}") from error


def _machine_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _fingerprint(compiler: list[str], library: Library) -> str:
    """Hash the sources, the flags, the OpenMP runtime and the CPU.

    So machines that share a home folder do not load code compiled for another CPU.
    """
    digest = hashlib.blake2b(_describe_cpu(compiler).encode(), digest_size=12)
    digest.update(repr((compiler, FLAGS, _machine_flag(), str(openmp_library()))).encode())
    for source in (*library.sources, *library.included):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _describe_cpu(compiler: list[str]) -> str:
    """Describe this machine's CPU, for which code is compiled.

    Linux knows it, so that a machine without a compiler can load what was compiled before. Elsewhere the
    compiler is asked for its predefined macros.
    """
    try:
        with _CPUINFO.open() as file:
            first = takewhile(str.strip, file)
            facts = [line for line in first if line.partition(":")[0].strip() in _CPU_FACTS]
    except OSError:
        facts = []
    return "".join(facts) or _run([*compiler, *FLAGS, _machine_flag(), "-dM", "-E", "-x", "c", os.devnull])


def _compile(compiler: list[str], library: Library, path: Path) -> None:
    """Compile and link in a temporary folder, then rename, so that no process sees an unfinished library."""
    runtime = openmp_library()
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        linked = Path(work) / "library.so"
        objects = [str(Path(work) / f"{source.name}.o") for source in library.sources]
        flags = [*FLAGS, _machine_flag(), "-c"]
        commands = [
            [*compiler, *flags, str(source), "-o", target]
            for source, target in zip(library.sources, objects, strict=True)
        ]
        # Somebody waits for it.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        # Linking with -fopenmp would add the system's runtime.
        openmp = "-fopenmp" if runtime is None else str(runtime)
        _run([*compiler, "-shared", *objects, openmp, "-lm", "-o", str(linked)])
        linked.chmod(0o700)
        linked.replace(path)


def _run(command: list[str]) -> str:
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
            output, errors = communicate(process, _IDLE_S, _BUSY_S)
    except FileNotFoundError as error:
        raise KernelUnavailableError(
            f"no C compiler {command[0]!r} found; install gcc, or name another in $CC"
        ) from error
    except OSError as error:
        raise KernelUnavailableError(f"the C compiler failed: {' '.join(command)}: {error}") from error
    if process.returncode:
        raise KernelUnavailableError(f"the C compiler failed: {' '.join(command)}\n{errors.strip()[-2000:]}")
    return output
