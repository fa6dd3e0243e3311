"""`octavo serve`: an OpenAI-compatible server for one model."""

import asyncio
import dataclasses
import importlib.util
import logging
import os
import sys
import time
from contextlib import ExitStack
from functools import partial

from octavo.cli.interrupts import raise_on_interrupt
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineError, OctavoError
from octavo.progress import progress_bar
from octavo.server.config import ServerConfig

_LIBRARIES = ("starlette", "granian", "prometheus_client")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_serve(model: str | None, config: EngineConfig, server: ServerConfig, *, quiet: bool) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: the address is taken, a key cannot be read, or a library is missing.
        OctavoError: the model cannot be loaded, or the engine died.
    """
    for library in _LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"octavo serve needs {library}; install it with: pip install 'octavo[server]'")
    if model is not None:
        config = dataclasses.replace(config, model=model)
    logging.basicConfig(level=logging.INFO if server.access_log else logging.WARNING, format=_FORMAT)
    # The HTTP server's own lines say less than ours.
    logging.getLogger("_granian").setLevel(logging.ERROR)
    raise_on_interrupt()
    error = _serve(config, server, quiet)
    if isinstance(error, OctavoError):
        raise error
    if error is not None:
        raise EngineError(f"the engine died: {type(error).__name__}")


def _serve(config: EngineConfig, server: ServerConfig, quiet: bool) -> BaseException | None:
    from octavo.engine.engine import Engine
    from octavo.server.app import make_app
    from octavo.server.loop.engine_loop import EngineLoop
    from octavo.server.run import check_address, serve, url_of

    # Children, such as the one that renders chat templates, need no key.
    os.environ.pop("OCTAVO_API_KEY", None)
    check_address(server)
    begun = time.monotonic()
    with ExitStack() as stack:
        report = stack.enter_context(progress_bar("loading", enabled=not quiet and sys.stderr.isatty()))
        loop = EngineLoop(
            partial(Engine, config, progress=report),
            max_waiting=server.max_num_queued_reqs,
            max_waiting_tokens=server.max_num_queued_tokens,
            step_deadline_s=server.step_deadline_s,
        )
        gate = make_app(loop, server, config.model)

        def on_ready() -> None:
            stack.close()
            seconds = time.monotonic() - begun
            print(
                f"octavo: {gate.context.model} is served at {url_of(server)}, ready after {seconds:.1f} s",
                flush=True,
            )

        try:
            return asyncio.run(serve(gate, loop, server, on_ready))
        finally:
            loop.stop()
