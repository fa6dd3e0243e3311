"""Other projects' clients against live servers, in the environments that `make client-test` makes.

    python tests/server/clients/run.py [--environments build/clients] [--only NAME ...] [--save MACHINE]

A client is a file with_NAME.py or .mjs, which gets the URL of a server and a folder: with the tiny model's
tokenizer, or with the jobs of agents, for whom a scripted model reads files, edits them, runs a check and
answers. Its last line says what it did; its exit code says whether it worked. An agent fails, too, if a file
is not what it should be at the end, if any answer had a status of 400 or more, or if a turn of a long session
finds less than 95 % of the tokens of the turn before in the prefix cache.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "stress"))

from agent_scripts import SESSION, TASKS, differences, prepared  # noqa: E402
from server_process import ROOT, SMOLLM2, ServerProcess  # noqa: E402
from stress_report import make_parser, report  # noqa: E402
from support.common import table  # noqa: E402
from tiny_chat import write_model  # noqa: E402


@dataclass(frozen=True)
class Client:
    """A row of the table.

    Attributes:
        name: of its file.
        package: of PyPI or npm; empty: only its bodies are sent.
        environment: folder below --environments; empty: the driver needs no package.
        model: what is served; None: the tiny model of random weights.
        tools: a model of random weights is served that does agent_scripts.TASKS with these tools instead.
            Without, an agent says hello to the model.
        form: how the model of random weights writes.
        session: do agent_scripts.SESSION instead, and see that each turn finds the one before in the cache.
        setting: a further variable of the client's environment, NAME=VALUE.
    """

    name: str
    package: str
    environment: str
    model: str | None = None
    tools: str = ""
    form: str = "qwen"
    session: bool = False
    setting: str = ""

    @property
    def label(self) -> str:
        form = [self.form] if self.form != "qwen" else []
        more = [*form, *(["session"] if self.session else []), *([self.setting] if self.setting else [])]
        return f"{self.name} ({', '.join([self.tools or self.model or 'random', *more])})"


# Claude Code begins its instructions with a line for billing, unless it is told not to.
NO_BILLING = "CLAUDE_CODE_ATTRIBUTION_HEADER=0"
CLIENTS = (
    Client("langchain", "langchain-openai", "apps", SMOLLM2),
    Client("litellm", "litellm", "apps", SMOLLM2),
    Client("llm", "llm", "apps", SMOLLM2),
    Client("lm_eval", "lm-eval", "apps"),
    Client("guidellm", "guidellm", "guidellm"),
    Client("aiperf", "aiperf", "aiperf"),
    Client("codex", "@openai/codex", "npm", tools="codex"),
    Client("codex", "@openai/codex", "npm", tools="codex_freeform"),
    Client("claude_code", "@anthropic-ai/claude-code", "npm", tools="claude"),
    Client("codex", "@openai/codex", "npm", tools="codex", form="harmony"),
    Client("codex", "@openai/codex", "npm", tools="codex_freeform", form="harmony"),
    Client("claude_code", "@anthropic-ai/claude-code", "npm", tools="claude", form="harmony"),
    Client("codex", "@openai/codex", "npm", tools="codex", session=True),
    Client("codex", "@openai/codex", "npm", tools="codex_freeform", session=True),
    Client("claude_code", "@anthropic-ai/claude-code", "npm", tools="claude", session=True),
    Client(
        "claude_code", "@anthropic-ai/claude-code", "npm", tools="claude", session=True, setting=NO_BILLING
    ),
    Client("codex", "@openai/codex", "npm", SMOLLM2),
    Client("claude_code", "@anthropic-ai/claude-code", "npm", SMOLLM2),
    Client("opencode", "opencode-ai", "npm", tools="opencode"),
    Client("opencode", "opencode-ai", "npm", tools="opencode", session=True),
    Client("aider", "aider-chat", "aider", tools="aider"),
    Client("openai_agents", "openai-agents", "agents", tools="own"),
    Client("pydantic_ai", "pydantic-ai-slim", "agents", tools="own"),
    Client("smolagents", "smolagents", "agents", tools="smolagents"),
    Client("langgraph", "langgraph", "agents", tools="own"),
    Client("ollama", "ollama", "agents", tools="own"),
    Client("open_webui", "", "", tools="own"),
    Client("crewai", "crewai", "crewai", tools="own"),
    Client("ai_sdk", "ai", "npm", tools="own"),
    Client("continue", "@continuedev/openai-adapters", "npm", tools="own"),
)
OPTIONS = ("--num-blocks", "512", "--served-model-name", "octavo")
SCRIPTED_OPTIONS = ("--num-blocks", "16384", "--access-log", "--response-store-mib", "16")
TIMEOUT_S = 600
MIN_HITS = 0.95
_VERSION = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
_BAD_STATUS = re.compile(r"octavo\.server: \S+ \w+ '(\S+)' ([45]\d\d)")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--only", nargs="+", choices=sorted({client.name for client in CLIENTS}))
    arguments = parser.parse_args()
    environments = arguments.environments.absolute()
    rows, failures = [], []
    for client in CLIENTS:
        if arguments.only and client.name not in arguments.only:
            continue
        begun = time.monotonic()
        outcome, detail, left = _run(client, environments)
        version = _version(client, environments)
        rows.append([client.label, version, outcome, f"{time.monotonic() - begun:.0f}", detail])
        print(client.label, outcome, detail, flush=True)
        if outcome != "ok":
            failures.append(f"{client.label}: {detail}")
        failures += [f"{client.label}: left {left}"] if left else []
    print(table(["client", "version", "outcome", "s", "what it did"], rows))
    return report("clients", {"rows": rows, "failures": failures}, arguments)


def _run(client: Client, environments: Path) -> tuple[str, str, dict[str, float]]:
    """Run a client against a server of its own; return the outcome, its last line, and what is left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _server(client, folder) as server:
            try:
                done = subprocess.run(
                    [*_program(client, environments), server.url, name, *client.tools.split()],
                    cwd=folder,
                    env={**os.environ, **_variables(client, environments)},
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return "hangs", f"no end after {TIMEOUT_S} s", server.leftovers()
            bad = [*map(" ".join, _BAD_STATUS.findall(server.errors())), *differences(folder)]
            hits = _hits(folder) if client.session else []
            bad += misses(hits) if client.session else []
            if done.returncode != 0 or bad:
                print(*bad, done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
                lines = bad or done.stderr.strip().splitlines() or ["no message"]
                return "fails", lines[-1][:200], server.leftovers()
            found = server.metrics()
            cached = found["vllm:prefix_cache_hits_total"] / max(1, found["vllm:prefix_cache_queries_total"])
            detail = f"{done.stdout.strip().splitlines()[-1]}; {cached:.0%} of prompts cached"
            if hits:
                detail += f"; % of the turn before cached: {' '.join(f'{100 * share:.1f}' for share in hits)}"
            return "ok", detail, server.leftovers()


def _hits(folder: Path) -> list[float]:
    """Return which share of the turn before, prompt and answer, each turn of a session found in the cache."""
    lines = [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]
    # An agent may ask for a title beside its turns, in few words.
    longest = max((line["prompt"] for line in lines), default=0)
    turns = [line for line in lines if line["turn"] >= 0 and 2 * line["prompt"] > longest]
    return [
        after["cached"] / (before["prompt"] + before["answer"])
        for before, after in itertools.pairwise(turns)
        if after["turn"] == before["turn"] + 1
    ]


def misses(hits: Sequence[float]) -> list[str]:
    """Return what is wrong with a session: it had other turns, or one found too little of the one before."""
    if len(hits) != len(SESSION.turns):
        return [f"{len(SESSION.turns)} turns were to go on with the one before, {len(hits)} did"]
    return [
        f"turn {number} found {share:.1%} of the turn before in the prefix cache, not {MIN_HITS:.0%}"
        for number, share in enumerate(hits, start=2)
        if share < MIN_HITS
    ]


def _server(client: Client, folder: Path) -> ServerProcess:
    """Start the server of a row; a client finds the tiny model's tokenizer in its folder, or nothing."""
    if client.tools:
        script = folder / "script.json"
        turns, jobs = prepared(client.tools, folder, (SESSION,) if client.session else TASKS)
        script.write_text(json.dumps(turns))
        (folder / "jobs.json").write_text(json.dumps(jobs))
        options = (
            "--script",
            str(script),
            "--form",
            client.form,
            "--turns",
            str(folder / "turns.jsonl"),
            *SCRIPTED_OPTIONS,
        )
        return ServerProcess(*options, script=HERE / "scripted_server.py")
    if client.environment == "npm":
        job = {
            "request": "Say hello.",
            "answer": "",
            "folder": str(folder),
            "streamed": True,
            "resumed": False,
        }
        (folder / "jobs.json").write_text(json.dumps([job]))
    config = write_model(folder) / "tokenizer_config.json"
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(json.loads(config.read_text()) | kind))
    log = ("--access-log",) if client.environment == "npm" else ()
    return ServerProcess(*OPTIONS, *log, model=client.model)


def _variables(client: Client, environments: Path) -> dict[str, str]:
    return {"OCTAVO_NPM": str(environments / "npm" / "node_modules"), "OCTAVO_SETTING": client.setting}


def _program(client: Client, environments: Path) -> list[str]:
    """Return the command of a client: packages of npm are driven by this Python, or by a script of Node's."""
    module = HERE / f"with_{client.name}.mjs"
    if module.exists():
        return ["node", str(module)]
    python = environments / client.environment / "bin" / "python"
    return [
        sys.executable if client.environment in ("npm", "") else str(python),
        str(HERE / f"with_{client.name}.py"),
    ]


def _version(client: Client, environments: Path) -> str:
    folder = environments / client.environment
    if not client.package:
        return "bodies"
    if client.environment == "npm":
        return json.loads((folder / "node_modules" / client.package / "package.json").read_text())["version"]
    return _output([str(folder / "bin" / "python"), "-c", _VERSION, client.package]).strip()


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
