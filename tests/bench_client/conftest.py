"""A scripted server for each test."""

from collections.abc import Iterator

import pytest
from scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()
