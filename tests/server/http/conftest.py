"""Servers on loopback: one with the real model, and tiny ones, shared or with options of their own."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from http_helpers import LiveServer, slow
from tiny_chat import TEMPLATE, write_model

from octavo import EngineConfig
from octavo.engine.engine import Engine

TINY = {"num_blocks": 256, "block_size": 4, "prepare": False, "load_format": "dummy"}


def served(config: EngineConfig, model: str) -> Iterator[LiveServer]:
    """Yield a server that is ready, then close it."""
    server = LiveServer(lambda: Engine(config), model, sse_keep_alive_s=0)
    yield server.wait_until_ready()
    server.close()


@pytest.fixture(scope="session")
def real_server() -> Iterator[LiveServer]:
    config = EngineConfig(dtype="float32", num_blocks=512)
    yield from served(config, "smollm2")


@pytest.fixture
def real(real_server: LiveServer) -> Iterator[LiveServer]:
    """The real model; afterwards no request and no block may be left."""
    yield real_server
    real_server.assert_drained()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny-chat"))


@pytest.fixture(scope="session")
def tiny_server(model_folder: Path) -> Iterator[LiveServer]:
    config = EngineConfig.from_dict({"model": str(model_folder), **TINY})
    yield from served(config, "tiny")


@pytest.fixture
def live(tiny_server: LiveServer) -> Iterator[LiveServer]:
    """The tiny model; afterwards no request and no block may be left."""
    yield tiny_server
    tiny_server.assert_drained()


@pytest.fixture
def slow_live(live: LiveServer) -> Iterator[LiveServer]:
    """The tiny model, which takes its time: long requests outlast any test."""
    step = live.loop.engine.step
    slow(live)
    yield live
    live.loop.engine.step = step  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    """OpenAI's client, which takes a second to import: only a process that runs its tests does."""
    return importlib.import_module("openai")


@pytest.fixture(scope="session")
def roomy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_model(tmp_path_factory.mktemp("roomy-chat"), max_model_len=4096)
    config = EngineConfig.from_dict({"model": str(folder), **TINY, "num_blocks": 2048})
    yield from served(config, "tiny")


@pytest.fixture
def roomy(roomy_server: LiveServer) -> Iterator[LiveServer]:
    """The tiny model with a context that tools fit in; afterwards no request and no block may be left."""
    yield roomy_server
    roomy_server.assert_drained()


@pytest.fixture
def serve_tiny(model_folder: Path) -> Iterator[Callable[..., LiveServer]]:
    """Serve a tiny model with options of the engine, and of the server as keyword arguments."""
    servers: list[LiveServer] = []

    def serve(engine: dict | None = None, *, ready: bool = True, **options: Any) -> LiveServer:
        config = EngineConfig.from_dict({"model": str(model_folder), **TINY, **(engine or {})})
        servers.append(LiveServer(lambda: Engine(config), "tiny", **options))
        return servers[-1].wait_until_ready() if ready else servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def serve_template(tmp_path: Path, serve_tiny: Callable[..., LiveServer]) -> Callable[..., LiveServer]:
    """Serve the tiny model with another chat template; pieces of its tokenizer may be renamed."""

    def serve(
        template: str = TEMPLATE,
        *,
        rename: tuple[str, str] = ("", ""),
        max_model_len: int = 4096,
        engine: Mapping[str, object] | None = None,
        **options: Any,
    ) -> LiveServer:
        folder = write_model(tmp_path, max_model_len)
        (folder / "chat_template.jinja").write_text(template)
        if rename[0]:
            text = (folder / "tokenizer.json").read_text().replace(*rename)
            (folder / "tokenizer.json").write_text(text)
        return serve_tiny({"model": str(folder), "num_blocks": 2048, **(engine or {})}, **options)

    return serve
