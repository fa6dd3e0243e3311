"""A rank that finds no memory, for tests: Python imports this file by itself where PYTHONPATH has its folder.

In ranks other than 0, SHORT_OF_MEMORY says where: "load", or a file. While that exists, the next step of the
network finds no memory, and the file is gone.
"""

import os
import sys
from pathlib import Path

WHERE = os.environ.get("SHORT_OF_MEMORY", "")


def install() -> None:
    """Replace the allocation of the cache, or the run of the network."""
    import torch

    from octavo.engine import runner_setup
    from octavo.engine.model_runner import ModelRunner

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 7 GiB, as this test asks for")

    run = ModelRunner._forward

    def run_or_fail(*arguments: object) -> object:
        if Path(WHERE).exists():
            Path(WHERE).unlink()
            fail()
        return run(*arguments)  # type: ignore[arg-type]

    if WHERE == "load":
        runner_setup._allocate_kv_cache = fail  # type: ignore[assignment]
    else:
        ModelRunner._forward = run_or_fail  # type: ignore[method-assign, assignment]


if WHERE and "octavo.engine.ranks.follower" in sys.orig_argv:
    install()
