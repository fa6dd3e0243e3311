"""aider: edits as blocks of text, whole and streamed; it runs the check itself."""

import sys
from pathlib import Path

from closed import jobs, run_closed

URL, FOLDER = sys.argv[1], Path(sys.argv[2])
VARIABLES = {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
OPTIONS = [
    "--model",
    "openai/octavo",
    "--edit-format",
    "diff",
    "--no-git",
    "--yes-always",
    "--no-show-model-warnings",
    "--analytics-disable",
    "--no-check-update",
    "--no-show-release-notes",
    "--no-detect-urls",
    "--map-tokens",
    "0",
    "--auto-test",
    "--test-cmd",
]
aider = [str(Path(sys.executable).parent / "aider"), *OPTIONS, "python3 check.py"]
# A table of prices would be fetched.
prices = FOLDER / "home" / ".aider" / "caches" / "model_prices_and_context_window.json"
prices.parent.mkdir(parents=True)
prices.write_text('{"octavo": {}}')
for job in jobs():
    folder = Path(job["folder"])
    files = sorted(path.name for path in folder.iterdir() if path.name != "check.py")
    stream = "--stream" if job["streamed"] else "--no-stream"
    done = run_closed(
        [*aider, stream, "--message", job["request"], *files], folder, FOLDER / "home", VARIABLES
    )
    assert "passed" in done.stdout, done.stdout
print(f"{len(jobs())} tasks, whole and streamed, edits in text")
