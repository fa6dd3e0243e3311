"""opencode, headless: five tasks with read, edit, write and bash."""

import json
import os
import sys
from pathlib import Path

from closed import jobs, run_closed

URL, FOLDER = sys.argv[1], Path(sys.argv[2])
PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "Octavo",
    "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
    "models": {"octavo": {"name": "octavo", "limit": {"context": 131072, "output": 4096}}},
}
CONFIG = {
    "model": "octavo/octavo",
    "small_model": "octavo/octavo",
    "provider": {"octavo": PROVIDER},
    "enabled_providers": ["octavo"],
    "autoupdate": False,
    "share": "disabled",
    "permission": {"edit": "allow", "bash": "allow"},
}
VARIABLES = {
    "OPENCODE_CONFIG_CONTENT": json.dumps(CONFIG),
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    # It installs a package for plugins in the background; without a registry it goes on.
    "npm_config_registry": "http://127.0.0.1:9/",
}
opencode = [f"{os.environ['OCTAVO_NPM']}/.bin/opencode", "run", "--pure"]
for job in jobs():
    command = [*opencode, *(["--continue"] if job["resumed"] else []), job["request"]]
    done = run_closed(command, Path(job["folder"]), FOLDER / "home", VARIABLES)
    assert job["answer"] in done.stdout, done.stdout
print(f"{len(jobs())} tasks with read, edit, write and bash")
