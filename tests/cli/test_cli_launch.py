"""`octavo launch`: what agents are started with, from what a server says, and files that are kept."""

import json
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

AGENT = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done > {folder}/words
env > {folder}/variables
exit 7
"""
CARDS = [{"id": "one", "max_model_len": 8192}, {"id": 'two "é"', "max_model_len": 131072}]


class Models(BaseHTTPRequestHandler):
    """Says what it serves to who has the key."""

    def do_GET(self) -> None:
        known = self.path == "/v1/models" and self.headers["Authorization"] == "Bearer secret"
        body = json.dumps({"data": CARDS}).encode()
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(body if known else b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Models)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def launch(tmp_path: Path, url: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Launch an agent that writes down what it gets, with a home of its own and this answer to questions."""
    for name in ("codex", "claude"):
        (tmp_path / name).write_text(AGENT.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)

    def run(
        *words: str, answer: str = "", at: str = url, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        own = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin", "OCTAVO_API_KEY": "secret,other"}
        for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR"):
            kept.pop(name, None)
        return subprocess.run(
            [sys.executable, "-m", "octavo", "launch", words[0], "--base-url", at, *words[1:]],
            env={**kept, **own, "no_proxy": "127.0.0.1", "PYTHONPATH": os.getcwd(), **variables},
            input=answer,
            capture_output=True,
            text=True,
        )

    return run


def words(folder: Path) -> list[str]:
    return (folder / "words").read_text().split("\0")[:-1]


def test_codex_gets_what_the_server_says(launch: Callable, tmp_path: Path, url: str) -> None:
    done = launch("codex", "--served-model-name", 'two "é"', "--", "exec", "--json", "hi there")
    assert done.returncode == 7, done.stderr
    given = words(tmp_path)
    assert given[-3:] == ["exec", "--json", "hi there"]
    assert given[0:-3:2] == ["-c"] * (len(given[:-3]) // 2)
    settings = tomllib.loads("\n".join(given[1:-3:2]))
    assert settings == tomllib.loads(done.stderr)
    provider = settings["model_providers"]["octavo"]
    assert (settings["model"], settings["model_context_window"]) == ('two "é"', 131072)
    assert (provider["base_url"], provider["env_key"]) == (f"{url}/v1", "OCTAVO_API_KEY")
    assert "OCTAVO_API_KEY=secret\n" in (tmp_path / "variables").read_text()
    assert not (tmp_path / ".codex").exists()


def test_claude_gets_what_the_server_says(launch: Callable, tmp_path: Path, url: str) -> None:
    assert launch("claude", at=f"{url}/v1/").returncode == 7
    flag, text = words(tmp_path)
    variables = json.loads(text)["env"]
    assert flag == "--settings"
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_MODEL"]) == (url, "one")
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
    assert int(variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) < 8192
    assert "ANTHROPIC_AUTH_TOKEN=secret\n" in (tmp_path / "variables").read_text()
    assert "secret" not in text


@pytest.mark.parametrize(
    ("agent", "file", "given"),
    [
        ("codex", ".codex/octavo.config.toml", ["--profile", "octavo"]),
        ("claude", ".claude/octavo.json", ["--settings", "{home}/.claude/octavo.json"]),
    ],
)
def test_files_are_written_only_after_a_yes_and_what_was_there_is_kept(
    launch: Callable, tmp_path: Path, agent: str, file: str, given: list[str]
) -> None:
    path = tmp_path / file
    done = launch(agent, "--write", answer="\n")
    assert f"Write {path}? [y/N]" in done.stderr
    assert not path.exists()
    assert words(tmp_path)[0] in ("-c", "--settings")
    launch(agent, "--write", answer="y\n")
    assert path.exists()
    assert words(tmp_path) == [word.format(home=tmp_path) for word in given]
    written = path.read_text()
    path.write_text("mine")
    assert f"Replace {path}" in launch(agent, "--write", answer="no\n").stderr
    assert path.read_text() == "mine"
    launch(agent, "--write", answer="yes\n")
    assert (path.read_text(), path.with_name(f"{path.name}.bak").read_text()) == (written, "mine")
    # What is there already is not asked about.
    assert "[y/N]" not in launch(agent, "--write").stderr


def test_what_is_missing_is_said_in_one_line(launch: Callable, tmp_path: Path) -> None:
    (tmp_path / "codex").unlink()
    for error, words_given, options in (
        ("npm install -g @openai/codex", ("codex",), {}),
        ('one of one, two "é", got three', ("claude", "--served-model-name", "three"), {}),
        ("octavo serve", ("claude",), {"at": "http://127.0.0.1:1"}),
        ('"codex", "claude"', ("gemini",), {}),
    ):
        done = launch(*words_given, **options)
        assert done.returncode == 2
        assert error in done.stderr.splitlines()[-1]
    assert "its key in OCTAVO_API_KEY" in launch("claude", OCTAVO_API_KEY="wrong").stderr
    assert not (tmp_path / "words").exists()
