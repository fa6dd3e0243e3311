"""What `make client-test` does, with the one client that needs no package."""

import subprocess
import sys
from pathlib import Path


def test_an_agent_does_its_tasks_whole_and_streamed() -> None:
    """It reads files, edits them and runs a check, over OpenAI's API and over Ollama's."""
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--only", "open_webui"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 tasks, whole and streamed: openai, ollama" in done.stdout
