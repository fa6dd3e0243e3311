"""Triton's cache of kernels, but for files that others could have written: those are compiled again."""

import json
import os
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from octavo.errors import ConfigError
from octavo.own_files import make_own_folder, opened_own


class OwnKernels(FileCacheManager):
    """The files of one kernel.

    Triton makes its files with the rights that the umask leaves, so the group's is taken away here.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        """Open the folder of a kernel; see FileCacheManager.

        Raises:
            ConfigError: others could have put files into it.
        """
        # What a developer dumps, or puts in place of a kernel, is elsewhere.
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
        """Store a file; see FileCacheManager."""
        path = super().put(data, filename, binary)
        if self._is_cache:
            # Nobody else sees it before: the folder is the user's alone.
            os.chmod(path, os.lstat(path).st_mode & 0o755)
        return path
