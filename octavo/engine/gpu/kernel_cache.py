"""The folder of compiled GPU kernels, checked before it is used, because whatever lies there will run.

Imported only where Triton runs.
"""

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from triton import knobs
from triton.runtime.cache import FileCacheManager

from octavo.errors import ConfigError
from octavo.kernels.c.compiler import cache_folder
from octavo.own_files import make_own_folder, opened_own

_PACKAGE = Path(__file__).parents[2]


class KernelCache:
    """Triton's folder of compiled kernels, and notes of the jobs whose kernels are all there.

    A note is an empty file. Kernels that went missing afterwards are compiled again when they are needed.

    Attributes:
        folder: the folder.
    """

    def __init__(self, folder: str | None) -> None:
        """Check the folder, make it if there is none, and let Triton use it, in all of this process.

        Args:
            folder: None: what TRITON_CACHE_DIR says, else a folder beside those of a CPU. Triton's default,
                ~/.triton/cache, may be open to the user's group, depending on the umask.

        Raises:
            ConfigError: it cannot be made, or others could write kernels to it.
        """
        path = Path(_default_folder() if folder is None else folder).expanduser().absolute()
        try:
            make_own_folder(path)
        except OSError as error:
            raise ConfigError(
                f"the folder for compiled kernels, {path}, cannot be used: {error.strerror}; "
                "name another one by kernel_cache_dir"
            ) from error
        except ConfigError as error:
            raise ConfigError(
                f"others could put kernels into {path}, and this process would run them: {error}; or name "
                "another folder by kernel_cache_dir"
            ) from error
        knobs.cache.dir = str(path)
        if knobs.cache.manager_class is None:
            knobs.cache.manager_class = OwnKernels
        self.folder = path

    @property
    def num_bytes(self) -> int:
        """Size of all files in the folder."""
        num_bytes = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                # Another process that compiles removes its temporary files meanwhile.
                with suppress(FileNotFoundError):
                    num_bytes += os.stat(os.path.join(folder, name)).st_size
        return num_bytes

    def is_complete(self, job: object) -> bool:
        """Say whether all kernels of a job were compiled on such a GPU, by these sources.

        Args:
            job: everything that decides which kernels there are, identified by its repr.
        """
        return self._note(job).exists()

    def note_complete(self, job: object) -> None:
        """Note that all kernels of a job are there. A folder that cannot be written stays as it is."""
        try:
            self._note(job).touch()
        except OSError:
            # An image's folder may be read-only: kernels are there all the same.
            return

    def _note(self, job: object) -> Path:
        facts = (torch.__version__, torch.version.cuda, torch.cuda.get_device_properties(), sources_digest())
        return self.folder / f"octavo-{hashlib.sha256(repr((facts, job)).encode()).hexdigest()[:32]}"


def _default_folder() -> str:
    if knobs.cache.dir != knobs.cache.get_triton_dir("cache"):
        return knobs.cache.dir
    # The folder above it gets the rights that the CPU's kernels need.
    with suppress(OSError):
        make_own_folder(cache_folder())
    return str(cache_folder() / "triton")


@cache
def sources_digest() -> str:
    """Return a digest of this package's sources: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h")):
        digest.update(str(path.relative_to(_PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class OwnKernels(FileCacheManager):
    """The files of one kernel.

    Triton makes its files with the rights that the umask leaves, so the group's is taken away here. It also
    replaces a file that another process has stored meanwhile. A library must stay the file that it is:
    CPython (dynload_shlib.c) remembers which inode it opened before dlopen opens the path anew. If the file
    was replaced in between, the first inode is free, and the next library that gets it is taken for this one:
    a kernel would be launched with the arguments of another.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        """Open the folder of a kernel; see FileCacheManager.

        Raises:
            ConfigError: others could have put files into it.
        """
        # A developer's dumps and overrides of kernels lie in other folders.
        self._is_cache = not override and not dump
        if self._is_cache:
            make_own_folder(Path(knobs.cache.dir) / key)
        super().__init__(key, override, dump)

    def has_file(self, filename: str) -> bool:
        """Say whether a file is there that nobody else could have written."""
        if not self._is_cache:
            return super().has_file(filename)
        try:
            with opened_own(Path(self._make_path(filename))):
                return True
        except (OSError, ConfigError):
            return False

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files that belong together, None if one is not to be used."""
        group = super().get_group(filename)
        if group is None or not self._is_cache:
            return group
        with open(self._make_path(f"__grp__{filename}")) as file:
            expected = json.load(file)["child_paths"]
        own = {name: self.get_file(name) for name in expected}
        return group if own == group == expected else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Store a file; see FileCacheManager. A library that is there already stays."""
        if not self._is_cache:
            return super().put(data, filename, binary)
        is_library = filename.endswith(".so")
        stored = super().put(data, f"{filename}.{uuid4().hex}" if is_library else filename, binary)
        # Nobody else could see it before, because only the user can open the folder.
        os.chmod(stored, os.lstat(stored).st_mode & 0o755)
        if not is_library:
            return stored
        path = self._make_path(filename)
        try:
            os.link(stored, path)
        except FileExistsError:
            if not self.has_file(filename):
                os.replace(stored, path)
        Path(stored).unlink(missing_ok=True)
        return path
