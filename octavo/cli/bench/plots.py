"""Checks, before a command measures anything, that it can draw."""

import importlib.util
from pathlib import Path

from octavo.errors import ConfigError
from octavo.install_hint import install_extra


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"plot needs matplotlib, which is not installed; run: {install_extra('plot')}")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"plot must be a .png, .svg or .pdf file, got {str(path)!r}")
    check_folder("plot", path)


def check_folder(name: str, path: Path) -> None:
    """Check that a file's folder exists.

    Raises:
        ConfigError: it does not.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{name} must be in a folder that exists; there is no {str(path.parent)!r}")
