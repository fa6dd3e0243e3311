"""`octavo serve`: an OpenAI-compatible server for one model; `octavo run-batch`: the same for a file."""

import asyncio
import dataclasses
import importlib.util
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.interrupts import raise_on_interrupt
from octavo.cli.streams import leave_at_once, say
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError, EngineError, IncompleteBatchError, OctavoError
from octavo.install_hint import install_extra
from octavo.progress import Report, progress_bar
from octavo.server.config import ServerConfig
from octavo.server.startup import check_address, configure_logging, url_of
from octavo.server.supervisor import READY, Child, supervise

if TYPE_CHECKING:
    from octavo.server.app import Gate
    from octavo.server.batch import BatchLine, BatchRequest
    from octavo.server.loop.engine_loop import EngineLoop
    from octavo.server.replicas.parent import Role

_LIBRARIES = ("starlette", "granian", "prometheus_client")


def run_serve(model: str | None, config: EngineConfig, server: ServerConfig, *, quiet: bool) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: the address is taken, a key cannot be read, or a library is missing.
        OctavoError: the model cannot be loaded.
        EngineError: the engine died, with --restart too often.
        SystemExit: with --restart or --replicas, from the parent process.
    """
    config = _prepared(model, config)
    configure_logging(server)
    raise_on_interrupt()
    check_address(server)
    if server.replicas > 1:
        return _serve_replicas(config, server, quiet)
    child = supervise(server) if server.restart else Child()
    _serve(config, server, quiet, child)


def _serve_replicas(config: EngineConfig, server: ServerConfig, quiet: bool) -> None:
    _require("aiohttp")
    from octavo.server.replicas.parent import fork_replicas

    role = fork_replicas(server, config.device, config.tensor_parallel_size)
    if role.replica is None:
        _serve_front(config, role)
    else:
        _serve(config, role.config, quiet or role.replica > 0, role.child, is_replica=True)


def _serve_front(config: EngineConfig, role: "Role") -> None:
    from octavo.server.replicas.front import serve_front

    begun = time.monotonic()

    def tell_ready() -> None:
        where = f"{role.config.served_model_name or config.model} is served at {url_of(role.config)}"
        seconds = time.monotonic() - begun
        say(f"octavo: {where} by {len(role.sockets)} replicas, ready after {seconds:.1f} s")

    leave_at_once()
    asyncio.run(serve_front(role.config, role.sockets, tell_ready))


def _serve(
    config: EngineConfig, server: ServerConfig, quiet: bool, child: Child, *, is_replica: bool = False
) -> None:
    # A parent that supervises never imports PyTorch.
    from octavo.server.replicas.reporting import ReportingApp
    from octavo.server.serving import serve

    begun = time.monotonic()
    with ExitStack() as stack:
        report = stack.enter_context(progress_bar("loading", enabled=not quiet and sys.stderr.isatty()))
        loop, gate = _make(config, server, report, child)

        def tell(news: bytes) -> None:
            child.tell(news)
            if news == READY:
                stack.close()
            if news == READY and not is_replica:
                seconds = time.monotonic() - begun
                pooling = loop.engine.model_config.pooling
                does = "is served" if pooling is None else pooling.does
                where = f"{gate.context.model} {does} at {url_of(server)}"
                say(f"octavo: {where}, ready after {seconds:.1f} s")

        leave_at_once()
        try:
            app = ReportingApp(gate, loop) if is_replica else gate
            error = asyncio.run(serve(gate, loop, server, tell, app))
        finally:
            loop.stop()
    if error is not None:
        raise _explained(error, was_ready=loop.stats().engine is not None)


def _make(
    config: EngineConfig, server: ServerConfig, report: Report, child: Child
) -> "tuple[EngineLoop, Gate]":
    from octavo.engine.engine import Engine
    from octavo.server.app import make_app
    from octavo.server.loop.engine_loop import EngineLoop

    # Children, such as the one that renders chat templates, need no key.
    os.environ.pop("OCTAVO_API_KEY", None)
    loop = EngineLoop(
        partial(Engine, config, progress=report),
        max_waiting=server.max_num_queued_reqs,
        max_waiting_tokens=server.max_num_queued_tokens,
        step_deadline_s=server.step_deadline_s,
    )
    return loop, make_app(loop, server, config.model, child.num_restarts)


def _explained(error: BaseException, *, was_ready: bool) -> OctavoError:
    """Return an error to raise: the model's, if it could not be loaded, else an engine's."""
    if isinstance(error, OctavoError):
        return EngineError(f"the engine died: {error}") if was_ready else error
    # Its message might contain a prompt.
    return EngineError(f"the engine died: {type(error).__name__}")


def run_batch(
    model: str | None, config: EngineConfig, input_file: Path, output_file: Path, *, quiet: bool
) -> None:
    """Answer the requests of a file by the server's code, without a server; see octavo.server.batch.

    Raises:
        ConfigError: a library is missing.
        PromptError: the file has too many lines.
        IncompleteBatchError: some lines have errors; all others are answered.
        OctavoError: the model cannot be loaded, or the engine died.
        OSError: a file cannot be read or written.
    """
    config = _prepared(model, config)
    from octavo.server.batch import BatchRequest, read_batch, write_lines

    requests = read_batch(input_file)
    if output_file.exists() and output_file.samefile(input_file):
        raise ConfigError(f"output_file must be another file than input_file, got {output_file} for both")
    if any(isinstance(request, BatchRequest) for request in requests):
        num_failed = _answer_batch(config, requests, output_file, quiet)
    else:
        # Without a request, as in a wrong file, no model is loaded.
        num_failed = write_lines(requests, output_file)
    print(f"octavo: {len(requests) - num_failed} of {len(requests)} requests were answered: {output_file}")
    if num_failed:
        raise IncompleteBatchError(
            f"{num_failed} of {len(requests)} requests failed; their lines in {output_file} say why"
        )


def _answer_batch(
    config: EngineConfig, requests: "list[BatchRequest | BatchLine]", output_file: Path, quiet: bool
) -> int:
    from octavo.server.batch import answer_all

    # No other client sends anything or leaves, so only the number of requests at a time needs a limit.
    server = ServerConfig(max_num_queued_reqs=2**30, max_num_queued_tokens=2**40, queue_timeout_s=0)
    configure_logging(server)
    raise_on_interrupt()
    with progress_bar("loading", enabled=not quiet and sys.stderr.isatty()) as report:
        loop, gate = _make(config, server, report, Child())
        loop.start()
        try:
            return asyncio.run(answer_all(gate, loop, requests, output_file, report))
        except EngineDeadError as error:
            was_ready = loop.stats().engine is not None
            raise _explained(loop.error or error, was_ready=was_ready) from error
        finally:
            loop.stop()
            gate.context.close()


def _prepared(model: str | None, config: EngineConfig) -> EngineConfig:
    for library in _LIBRARIES:
        _require(library)
    return config if model is None else dataclasses.replace(config, model=model)


def _require(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"this command needs {library}; run: {install_extra('server')}")
