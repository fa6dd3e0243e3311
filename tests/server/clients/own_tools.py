"""What every driver of a library shares: four tools, and a loop over the jobs, whole and streamed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from closed import jobs

URL = sys.argv[1]


def read_it(path: str) -> str:
    """Read a file.

    Args:
        path: its name.
    """
    return Path(path).read_text()


def edit_it(path: str, old: str, new: str) -> str:
    """Put a text in the place of another.

    Args:
        path: the file's name.
        old: what stands there once.
        new: what shall stand there.
    """
    text = Path(path).read_text()
    assert text.count(old) == 1, old
    Path(path).write_text(text.replace(old, new))
    return "done"


def write_it(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: its name.
        text: its text.
    """
    Path(path).write_text(text)
    return "done"


def run_it(command: str) -> str:
    """Run a command.

    Args:
        command: for the shell.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


TOOLS = (read_it, edit_it, write_it, run_it)
SCHEMAS = [
    {
        "name": tool.__name__,
        "description": (tool.__doc__ or "").splitlines()[0],
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in tool.__annotations__ if name != "return"},
            "required": [name for name in tool.__annotations__ if name != "return"],
            "additionalProperties": False,
        },
    }
    for tool in TOOLS
]


def call(name: str, arguments: dict[str, str]) -> str:
    """Call a tool by its name."""
    return next(tool for tool in TOOLS if tool.__name__ == name)(**arguments)


def run_jobs(*agents: Callable[[str, bool], str]) -> None:
    """Let agents do the jobs; each gets a request and whether to stream, and returns the last answer.

    Of several agents each does all of them, in files that are put back in between.
    """
    for agent in agents:
        for job in jobs():
            os.chdir(job["folder"])
            before = {path: path.read_text() for path in Path().iterdir() if path.is_file()}
            answer = agent(job["request"], job["streamed"])
            assert answer.strip().endswith(job["answer"]), answer
            if agent is not agents[-1]:
                for path in [path for path in Path().iterdir() if path.is_file()]:
                    path.unlink()
                for path, text in before.items():
                    path.write_text(text)
    # What a library has printed last may have no end of a line.
    print(f"\n{len(agents) * len(jobs())} tasks, whole and streamed: {', '.join(a.__name__ for a in agents)}")
