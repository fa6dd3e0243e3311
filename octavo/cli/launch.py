"""Starts a coding agent of others against a running server, with a configuration of its own.

No file of the user's is changed: both agents take a further file of settings, and the key stays in the
environment. Without `write` the same settings are arguments.
"""

import json
import os
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

KEY = "OCTAVO_API_KEY"
_TIMEOUT_S = 10


@dataclass(frozen=True)
class Settings:
    """How an agent is told about a server.

    Attributes:
        package: where it comes from, for who lacks it.
        path: of its further file of settings.
        text: what the file holds.
        arguments: the same as arguments; named_arguments: those that name the file.
        variables: of its environment.
    """

    package: str
    path: Path
    text: str
    arguments: tuple[str, ...]
    named_arguments: tuple[str, ...]
    variables: dict[str, str]


def run_launch(agent: str, arguments: Sequence[str], url: str, model: str | None, *, write: bool) -> None:
    """Print an agent's configuration, write it if asked, and become the agent.

    Raises:
        ConfigError: no server answers, it has no such model, or the agent is not installed.
    """
    key = os.environ.get(KEY, "").split(",")[0].strip() or "none"
    url = url.rstrip("/").removesuffix("/v1")
    settings = {"codex": _codex, "claude": _claude}[agent](url, key, *_ask(url, key, model))
    print(settings.text, end="", file=sys.stderr, flush=True)
    is_kept = write and _write(settings.path, settings.text)
    chosen = settings.named_arguments if is_kept else settings.arguments
    program = shutil.which(agent)
    if program is None:
        raise ConfigError(f"{agent} is not installed; run: npm install -g {settings.package}")
    # The agent takes this process's place, so that the terminal and its signals are its own.
    os.execve(program, [agent, *chosen, *arguments], {**os.environ, **settings.variables})


def _ask(url: str, key: str, model: str | None) -> tuple[str, int]:
    """Return a model's name and the length of its context."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            cards: list[dict[str, Any]] = json.load(answer)["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = f"start one by `octavo serve`, give its --base-url, and its key in {KEY}"
        raise ConfigError(f"no server says at {url}/v1/models what it serves ({error}); {hint}") from error
    names = [card["id"] for card in cards]
    if not names or model not in (None, *names):
        raise ConfigError(f"served_model_name must be one of {', '.join(names) or 'none'}, got {model}")
    card = cards[0 if model is None else names.index(model)]
    return card["id"], card.get("max_model_len") or 8192


def _codex(url: str, key: str, model: str, max_model_len: int) -> Settings:
    values = {
        "model": model,
        "model_provider": "octavo",
        "model_context_window": max_model_len,
        "model_providers.octavo.name": "Octavo",
        "model_providers.octavo.base_url": f"{url}/v1",
        "model_providers.octavo.env_key": KEY,
        "model_providers.octavo.wire_api": "responses",
    }
    # A JSON string or number is TOML, too.
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    path = Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex") / "octavo.config.toml"
    inline = tuple(word for line in lines for word in ("-c", line.replace(" = ", "=", 1)))
    text = "\n".join((*lines, ""))
    return Settings("@openai/codex", path, text, inline, ("--profile", "octavo"), {KEY: key})


def _claude(url: str, key: str, model: str, max_model_len: int) -> Settings:
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(max_model_len),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(32000, max_model_len // 4)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    text = json.dumps({"env": variables}, indent=2) + "\n"
    path = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "octavo.json"
    package, secret = "@anthropic-ai/claude-code", {"ANTHROPIC_AUTH_TOKEN": key}
    return Settings(package, path, text, ("--settings", text), ("--settings", str(path)), secret)


def _write(path: Path, text: str) -> bool:
    """Write a file if the user agrees, with a backup of what was there; return whether it holds the text."""
    if path.exists() and path.read_text() == text:
        return True
    backup = path.with_name(f"{path.name}.bak")
    question = f"Replace {path} and keep it as {backup.name}?" if path.exists() else f"Write {path}?"
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin is None or sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(backup)
    path.write_text(text)
    return True
