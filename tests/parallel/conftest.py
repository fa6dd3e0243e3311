"""Tiny models for engines with several ranks, and a look at what they leave behind."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ranks_helpers import eventually, other_ranks
from tiny_model import TINY_LLAMA


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose vocabulary two ranks do not divide."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


@pytest.fixture
def leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test no rank runs, and no temporary file and no open socket or pipe is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = connections()
    yield
    eventually(lambda: not other_ranks())
    eventually(lambda: connections() <= before)
    assert not [*folder.iterdir()]


def connections() -> set[str]:
    """Sockets and pipes that this process has open."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(file.readlink()))
    return {name for name in found if name.startswith(("socket:", "pipe:"))}
