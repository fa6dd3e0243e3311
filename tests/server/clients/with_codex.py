"""Codex, headless: five tasks, with patches by its shell or, with a catalogue, by its free-text tool.

Codex's own instructions would not fit SmolLM2's context: the catalogue has short ones.
"""

import json
import os
import sys
from pathlib import Path

from closed import jobs, run_closed

URL, FOLDER, TOOLS = sys.argv[1], Path(sys.argv[2]), "".join(sys.argv[3:])
MODEL = {
    "slug": "octavo",
    "display_name": "octavo",
    "description": None,
    "default_reasoning_level": None,
    "supported_reasoning_levels": [],
    "shell_type": "shell_command",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
    "upgrade": None,
    "base_instructions": "You are a coding agent.",
    "apply_patch_tool_type": "freeform",
    "support_verbosity": False,
    "default_verbosity": None,
    "truncation_policy": {"mode": "tokens", "limit": 10000},
    "supports_parallel_tool_calls": True,
    "experimental_supported_tools": [],
    "supports_reasoning_summaries": False,
    "context_window": 131072,
}
CONFIG = f"""
model = "octavo"
model_provider = "octavo"
check_for_update_on_startup = false
{{catalogue}}

[analytics]
enabled = false

# The catalogue of plugins is on other machines.
[features]
plugins = false

[model_providers.octavo]
name = "Octavo"
base_url = "{URL}/v1"
env_key = "OCTAVO_API_KEY"
wire_api = "responses"
"""
home = FOLDER / "home"
settings = home / ".codex"
settings.mkdir(parents=True)
(settings / "models.json").write_text(json.dumps({"models": [MODEL]}))
catalogue = f'model_catalog_json = "{settings}/models.json"' if TOOLS != "codex" else ""
(settings / "config.toml").write_text(CONFIG.format(catalogue=catalogue))
codex = ["node", f"{os.environ['OCTAVO_NPM']}/@openai/codex/bin/codex.js"]
variables = {"CODEX_HOME": str(settings), "OCTAVO_API_KEY": "none"}
for job in jobs():
    # The folder of the test is the sandbox: Codex's own needs rights that few machines give.
    options = ["exec", *(["resume", "--last"] if job["resumed"] else [])]
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", job["request"]]
    done = run_closed([*codex, *options], Path(job["folder"]), home, variables)
    assert done.stdout.strip().endswith(job["answer"]), done.stdout
print(f"{len(jobs())} tasks, tools: {TOOLS or 'none'}")
