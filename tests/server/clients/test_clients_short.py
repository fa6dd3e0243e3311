"""What `make client-test` does, with the one client that needs no package."""

import subprocess
import sys
from pathlib import Path

from run import SESSION, misses


def test_an_agent_does_its_tasks_whole_and_streamed() -> None:
    """It reads files, edits them and runs a check, over OpenAI's API and over Ollama's."""
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--only", "open_webui"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 tasks, whole and streamed: openai, ollama" in done.stdout


def test_a_session_fails_by_the_turn_that_finds_too_little() -> None:
    hits = [0.99] * len(SESSION.turns)
    assert len(hits) == 11
    assert misses(hits) == []
    assert misses([*hits[:4], 0.94, *hits[5:]]) == [
        "turn 6 found 94.0% of the turn before in the prefix cache, not 95%"
    ]
    assert misses(hits[1:]) == ["11 turns were to go on with the one before, 10 did"]
