"""llm, the command: a model from extra-openai-models.yaml, streamed and whole."""

import os
import subprocess
import sys
from pathlib import Path

url, folder = sys.argv[1:]
Path(folder, "extra-openai-models.yaml").write_text(
    f"- model_id: octavo\n  model_name: octavo\n  api_base: {url}/v1\n  api_key_name: octavo\n"
)
environment = {**os.environ, "LLM_USER_PATH": folder}


def ask(*options: str) -> str:
    command = [sys.executable, "-m", "llm", "prompt", "-m", "octavo", "--key", "none", "What is gravity?"]
    command += ["-o", "temperature", "0", "-o", "max_tokens", "16", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


streamed = ask()
assert streamed.strip()
assert streamed == ask("--no-stream")
print("streamed = --no-stream")
