"""Where compiled GPU kernels are kept: checked before it is used, since what lies there will run.

Importing this imports no Triton.
"""

import os
import stat
from pathlib import Path

from octavo.errors import ConfigError


def use_kernel_cache(folder: str | None) -> Path:
    """Check the folder, make it if there is none, and let Triton use it from now on, in this process.

    Args:
        folder: None: Triton's own choice, TRITON_CACHE_DIR or ~/.triton/cache.

    Returns:
        The folder.

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
            f"{stat.filemode(status.st_mode)}), and this process would run them; name another folder by "
            "kernel_cache_dir, or take the right away"
        )
    knobs.cache.dir = str(path)
    return path


def kernel_cache_bytes(folder: Path) -> int:
    """Return the size of all files in the folder."""
    return sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())
