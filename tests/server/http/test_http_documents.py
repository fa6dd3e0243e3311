"""docs/serving.md: its commands work, and it names every field and option."""

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from http_helpers import LiveServer

from octavo.server.api.decode import _REFUSED
from octavo.server.api.types import ChatRequest, CompletionRequest, StreamOptions
from octavo.server.app import ROUTES
from octavo.server.config import ServerConfig

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "serving.md").read_text()
COMMANDS = [block for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) if block.startswith("curl")]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_commands_work(real: LiveServer, command: str) -> None:
    assert shutil.which("curl"), "the examples need curl"
    here = command.replace("http://127.0.0.1:8000", real.url).replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(["sh", "-ec", here], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_field_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT))
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert known | set(StreamOptions.__struct_fields__) <= named
    assert not named & (_REFUSED.keys() - known)


def test_every_option_and_route_is_named() -> None:
    for option in fields(ServerConfig):
        flag = "--" + option.name.replace("_", "-")
        assert f"`{flag}`" in TEXT or option.name == "api_key", flag
    for _, path, _ in ROUTES:
        assert path.replace("{name:path}", "NAME") in TEXT, path


def test_the_refused_are_named() -> None:
    text = (DOCS / "server-api.md").read_text()
    listed = text.split("## Refused by name")[1].partition("\n\n`")[2]
    assert set(re.findall(r"(\w+)`", listed)) == _REFUSED.keys()
    for _, path, _ in ROUTES:
        assert path.replace("{name:path}", "NAME") in text, path


def test_the_tests_that_show_security_exist() -> None:
    tests = "".join(path.read_text() for path in (DOCS.parent / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (DOCS / "security.md").read_text())
    assert len(named) > 40
    assert not {name for name in named if f"def {name}(" not in tests}
