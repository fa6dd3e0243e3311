"""`octavo serve`: an OpenAI-compatible server for one model."""

import asyncio
import dataclasses
import importlib.util
import os
import sys
import time
from contextlib import ExitStack
from functools import partial

from octavo.cli.interrupts import raise_on_interrupt
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineError, OctavoError
from octavo.progress import progress_bar
from octavo.server.address import check_address, url_of
from octavo.server.config import ServerConfig
from octavo.server.logs import configure_logging
from octavo.server.supervisor import DYING, LISTENING, READY, Child, supervise

_LIBRARIES = ("starlette", "granian", "prometheus_client")


def run_serve(model: str | None, config: EngineConfig, server: ServerConfig, *, quiet: bool) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: the address is taken, a key cannot be read, or a library is missing.
        OctavoError: the model cannot be loaded.
        EngineError: the engine died, with --restart too often.
        SystemExit: with --restart, from the parent process.
    """
    for library in _LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"octavo serve needs {library}; install it with: pip install 'octavo[server]'")
    if model is not None:
        config = dataclasses.replace(config, model=model)
    configure_logging(server)
    raise_on_interrupt()
    check_address(server)
    child = supervise(server) if server.restart else None
    _serve(config, server, quiet, child)


def _serve(config: EngineConfig, server: ServerConfig, quiet: bool, child: Child | None) -> None:
    # A parent that supervises never imports PyTorch.
    from octavo.engine.engine import Engine
    from octavo.server.app import make_app
    from octavo.server.loop.engine_loop import EngineLoop
    from octavo.server.run import serve

    # Children, such as the one that renders chat templates, need no key.
    os.environ.pop("OCTAVO_API_KEY", None)
    begun = time.monotonic()
    with ExitStack() as stack:
        report = stack.enter_context(progress_bar("loading", enabled=not quiet and sys.stderr.isatty()))
        loop = EngineLoop(
            partial(Engine, config, progress=report),
            max_waiting=server.max_num_queued_reqs,
            max_waiting_tokens=server.max_num_queued_tokens,
            step_deadline_s=server.step_deadline_s,
        )
        gate = make_app(loop, server, config.model, num_restarts=child.num_restarts if child else 0)

        def tell(report: bytes) -> None:
            if child is not None:
                child.tell(report)

        def on_ready() -> None:
            tell(READY)
            stack.close()
            seconds = time.monotonic() - begun
            print(
                f"octavo: {gate.context.model} is served at {url_of(server)}, ready after {seconds:.1f} s",
                flush=True,
            )

        try:
            error = asyncio.run(
                serve(
                    gate,
                    loop,
                    server,
                    on_listening=partial(tell, LISTENING),
                    on_ready=on_ready,
                    on_dying=partial(tell, DYING),
                )
            )
        finally:
            loop.stop()
    if isinstance(error, OctavoError) and loop.stats().engine is None:
        # It could not be loaded.
        raise error
    if error is not None:
        # Any other message might hold a prompt.
        why = str(error) if isinstance(error, OctavoError) else type(error).__name__
        raise EngineError(f"the engine died: {why}")
