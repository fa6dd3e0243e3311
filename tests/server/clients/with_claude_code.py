"""Claude Code, headless: five tasks with Read, Edit, Write and Bash."""

import os
import sys
from pathlib import Path

from closed import jobs, run_closed

URL, FOLDER = sys.argv[1], Path(sys.argv[2])
VARIABLES = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "octavo",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "octavo",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
}
claude = ["node", f"{os.environ['OCTAVO_NPM']}/@anthropic-ai/claude-code/cli-wrapper.cjs"]
for job in jobs():
    options = ["--permission-mode", "acceptEdits", "--allowedTools", "Bash"]
    done = run_closed(
        [*claude, "-p", job["request"], *options], Path(job["folder"]), FOLDER / "home", VARIABLES
    )
    assert done.stdout.strip() == job["answer"], done.stdout
print(f"{len(jobs())} tasks with Read, Edit, Write and Bash")
