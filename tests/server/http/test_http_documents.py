"""docs/serving.md names every field and option; tests/test_commands.py runs its commands."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from msgspec import Struct

import octavo.server
from octavo.server.api.anthropic.messages_structs import MessagesRequest
from octavo.server.api.body import REFUSED
from octavo.server.api.pooled.pooled_input import POOLED
from octavo.server.api.responses.response_structs import ResponsesRequest
from octavo.server.api.sampling import _SAME_NAME
from octavo.server.api.structs import ChatRequest, CompletionRequest, StreamOptions
from octavo.server.app import ROUTES
from octavo.server.config import ServerConfig

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "serving.md").read_text()
EMBEDDINGS = (DOCS / "embeddings.md").read_text()

SECTIONS = (
    (
        "Fields of chats and completions",
        ChatRequest,
        ("chat.py", "sse.py", "sampling.py", "structs.py", "../reading/requests.py", "tools/toolbox.py"),
    ),
    (
        "Fields of chats and completions",
        CompletionRequest,
        ("completions.py", "sse.py", "sampling.py", "../reading/requests.py"),
    ),
    ("Fields of responses", ResponsesRequest, ("responses/response_route.py", "responses/response_input.py")),
    ("Anthropic's messages", MessagesRequest, ("anthropic/messages_route.py", "anthropic/messages_input.py")),
)


@pytest.mark.parametrize(("title", "kind", "files"), SECTIONS, ids=[kind.__name__ for _, kind, _ in SECTIONS])
def test_every_field_is_named_and_has_an_effect(
    title: str, kind: type[Struct], files: tuple[str, ...]
) -> None:
    section = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    named, known = set(re.findall(r"`(\w+)`", section)), set(kind.__struct_fields__)
    assert known <= named
    assert not named & (REFUSED.keys() - known - {*ChatRequest.__struct_fields__, "prompt"})
    api = Path(octavo.server.__path__[0], "api")
    nodes = [node for name in files for node in ast.walk(ast.parse((api / name).read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | set(_SAME_NAME)
    assert known <= read


@pytest.mark.parametrize("kind", [*dict.fromkeys(POOLED.values())])
def test_every_field_of_pooled_routes_is_named_and_has_an_effect(kind: type[Struct]) -> None:
    assert set(kind.__struct_fields__) <= set(re.findall(r"`(\w+)`", EMBEDDINGS))
    folder = Path(octavo.server.__path__[0], "api", "pooled")
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    assert set(kind.__struct_fields__) <= {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_every_option_of_streams_is_named() -> None:
    assert set(StreamOptions.__struct_fields__) <= set(re.findall(r"`(\w+)`", TEXT))


def test_every_option_and_route_is_named() -> None:
    for option in fields(ServerConfig):
        flag = "--" + option.name.replace("_", "-")
        assert f"`{flag}`" in TEXT or option.name == "api_key", flag
    for _, path, _ in ROUTES:
        assert path_in_words(path) in TEXT + EMBEDDINGS, path


def path_in_words(path: str) -> str:
    return re.sub(r"\{(\w+)[^}]*\}", lambda found: found[1].upper(), path)


def test_every_route_is_named_beside_other_servers() -> None:
    text = (DOCS / "server-api.md").read_text()
    for _, path, _ in ROUTES:
        assert path_in_words(path) in text, path


def test_the_tests_that_show_security_exist() -> None:
    tests = "".join(path.read_text() for path in (DOCS.parent / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (DOCS / "security.md").read_text())
    assert len(named) > 40
    assert not {name for name in named if f"def {name}(" not in tests}
