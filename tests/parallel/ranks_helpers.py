"""What tests of engines with several ranks share."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OPTIONS = {"load_format": "dummy", "device": "cpu", "num_blocks": 64, "block_size": 4}


def other_ranks(pid: int | None = None) -> list[int]:
    """Process ids of the ranks that a process has started, in order of rank, without those that ended."""
    found: list[int] = []
    for children in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        # A thread may end at any time.
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, children.read_text().split())
    return sorted(child for child in found if b"octavo.engine.ranks" in command_of(child))


def command_of(pid: int) -> bytes:
    """Its command line; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
