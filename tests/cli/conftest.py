"""A folder without octavo.toml, and an environment without OCTAVO_... variables."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder without variables."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("OCTAVO_"):
            monkeypatch.delenv(name)
