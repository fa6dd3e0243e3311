"""Claude Code, headless: five tasks with Read, Edit, Write and Bash, or a hello."""

import os
import sys
from pathlib import Path

from closed import jobs, run_closed

URL, FOLDER, TOOLS = sys.argv[1], Path(sys.argv[2]), "".join(sys.argv[3:])
# SmolLM2's context is too small for all of Claude Code's tools and its own instructions.
SHORT = ["--system-prompt", "You are a coding agent.", "--tools", "Read,Edit"]
VARIABLES = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "octavo",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "octavo",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    **dict(pair.split("=") for pair in os.environ["OCTAVO_SETTING"].split()),
}
claude = ["node", f"{os.environ['OCTAVO_NPM']}/@anthropic-ai/claude-code/cli-wrapper.cjs"]
for job in jobs():
    options = ["--permission-mode", "acceptEdits", "--allowedTools", "Bash"] if TOOLS else SHORT
    options += ["--continue"] if job["resumed"] else []
    done = run_closed(
        [*claude, "-p", job["request"], *options], Path(job["folder"]), FOLDER / "home", VARIABLES
    )
    assert job["answer"] in (done.stdout.strip(), ""), done.stdout
print(f"{len(jobs())} tasks, tools: {TOOLS or 'none'}")
