"""The folder of compiled GPU kernels, checked before it is used, because whatever lies there will run."""

import hashlib
import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from octavo.errors import ConfigError

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
            folder: None: Triton's own choice, TRITON_CACHE_DIR or ~/.triton/cache.

        Raises:
            ConfigError: it cannot be made, or others could write kernels to it.
        """
        from triton import knobs

        path = Path(knobs.cache.dir if folder is None else folder).expanduser().absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
        except OSError as error:
            raise ConfigError(
                f"the folder for compiled kernels, {path}, cannot be used: {error.strerror}; "
                "name another one by kernel_cache_dir"
            ) from error
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"others could put kernels into {path} (owner {status.st_uid}, "
                f"{stat.filemode(status.st_mode)}), and this process would run them; name another folder "
                "by kernel_cache_dir, or take the right away"
            )
        knobs.cache.dir = str(path)
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


@cache
def sources_digest() -> str:
    """Return a digest of this package's sources: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h")):
        digest.update(str(path.relative_to(_PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
