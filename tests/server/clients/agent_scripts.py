"""Five tasks for coding agents, and a session of twelve turns: what lies in the folder, what the model says
turn by turn, what must lie there at the end.

A step is ("read", path), ("edit", path, old, new), ("write", path, text) or ("run", command). Each agent has
tools of its own for these; a list of steps is one turn with several calls.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Call = dict[str, Any]
Step = tuple[str, ...]
# Markup of calls, quotes, backslashes and several bytes: all of it must arrive as it is.
HOSTILE = 'x = "</tool_call> \\\\ \\"é😀\\" {a,b}"\n'
ANSWER = "Done: the check passed."
GO_ON = "Thank you. Now write down what the words mean."
RUN = "python3 check.py"
CHECK = "import add\n\nassert add.add(1, 2) == 3, add.add(1, 2)\nprint('passed')\n"
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"


@dataclass(frozen=True)
class Task:
    """One conversation.

    Attributes:
        marker: stands in the request, and nowhere else.
        before, after: texts of files by name.
        turns: steps of each turn but the last, which is an answer. One without steps is an answer, too, after
            which the client says GO_ON.
    """

    marker: str
    before: Mapping[str, str]
    turns: tuple[tuple[Step, ...], ...]
    after: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.marker.replace(" ", "-")

    @property
    def request(self) -> str:
        return f"This is {self.marker}. Repair what is wrong in this folder, and run {RUN}."


REPAIR = (("edit", "add.py", "    return a - b", "    return a + b"),)
TASKS = (
    Task(
        "task repair",
        {"add.py": WRONG, "check.py": CHECK},
        ((("read", "add.py"),), REPAIR, (("run", RUN),)),
        {"add.py": RIGHT},
    ),
    Task(
        "task create",
        {"check.py": CHECK},
        ((("write", "add.py", RIGHT),), (("run", RUN),)),
        {"add.py": RIGHT},
    ),
    Task(
        "task failure",
        {"add.py": WRONG, "check.py": CHECK},
        ((("run", RUN),), (("read", "add.py"),), REPAIR, (("run", RUN),)),
        {"add.py": RIGHT},
    ),
    Task(
        "task hostile",
        {"add.py": RIGHT, "check.py": "import x\n\nassert len(x.x) > 9\n" + CHECK, "x.py": "x = 1\n"},
        ((("read", "x.py"),), (("write", "x.py", HOSTILE),), (("run", RUN),)),
        {"x.py": HOSTILE},
    ),
    Task(
        "task several",
        {"add.py": WRONG, "check.py": CHECK, "words.txt": "one\ntwo\n"},
        (
            (("read", "add.py"), ("read", "words.txt")),
            (*REPAIR, ("edit", "words.txt", "two", "zwei")),
            (("run", RUN),),
        ),
        {"add.py": RIGHT, "words.txt": "one\nzwei\n"},
    ),
)
# Claude Code takes spaces from the ends of lines.
WORDS = "".join(f"word {number} is a line of some words that are read and written\n" for number in range(60))
SESSION = Task(
    "task session",
    {"add.py": WRONG, "check.py": CHECK, "words.txt": "one\ntwo\n", "long.txt": WORDS},
    (
        (("run", RUN),),
        (("read", "add.py"), ("read", "check.py")),
        REPAIR,
        (("run", RUN),),
        (("read", "long.txt"),),
        (("write", "x.py", HOSTILE),),
        (),
        (("read", "words.txt"),),
        (("edit", "words.txt", "two", "zwei"),),
        (("write", "meaning.txt", WORDS),),
        (("read", "x.py"), ("run", RUN)),
    ),
    {"add.py": RIGHT, "words.txt": "one\nzwei\n", "x.py": HOSTILE, "meaning.txt": WORDS},
)


# Each writes a step as a call of an agent's own tool. Paths are absolute where the agent's tools ask for it.
def _own(step: Step, _: Path) -> tuple[str, Call]:
    names = {
        "read": ("path",),
        "edit": ("path", "old", "new"),
        "write": ("path", "text"),
        "run": ("command",),
    }
    return f"{step[0]}_it", dict(zip(names[step[0]], step[1:], strict=True))


def _claude(step: Step, folder: Path) -> tuple[str, Call]:
    kind, *values = step
    if kind == "run":
        return "Bash", {"command": values[0], "description": "Run it"}
    names = {"Read": (), "Edit": ("old_string", "new_string"), "Write": ("content",)}[kind.title()]
    return kind.title(), {"file_path": str(folder / values[0]), **dict(zip(names, values[1:], strict=True))}


def _opencode(step: Step, folder: Path) -> tuple[str, Call]:
    kind, *values = step
    if kind == "run":
        return "bash", {"command": values[0], "description": "Run it"}
    names = {"read": (), "edit": ("oldString", "newString"), "write": ("content",)}[kind]
    return kind, {"filePath": str(folder / values[0]), **dict(zip(names, values[1:], strict=True))}


def _patch(kind: str, path: str, *texts: str) -> str:
    if kind == "edit":
        old, new = (text.splitlines() for text in texts)
        body = [
            f"*** Update File: {path}",
            "@@",
            *(f"-{line}" for line in old),
            *(f"+{line}" for line in new),
        ]
    else:
        body = [f"*** Add File: {path}", *(f"+{line}" for line in texts[0].splitlines())]
    return "\n".join(("*** Begin Patch", *body, "*** End Patch", ""))


def _codex(step: Step, _: Path) -> tuple[str, Call]:
    kind, *values = step
    if kind in ("edit", "write"):
        return "exec_command", {"cmd": f"apply_patch <<'EOF'\n{_patch(*step)}EOF"}
    return "exec_command", {"cmd": values[0] if kind == "run" else f"cat {shlex.quote(values[0])}"}


def _codex_freeform(step: Step, folder: Path) -> tuple[str, Call]:
    return ("apply_patch", {"input": _patch(*step)}) if step[0] in ("edit", "write") else _codex(step, folder)


def _blocks(task: Task) -> str:
    """Write what a task changes as aider's blocks of text: it has no tools."""
    steps = [step for steps in task.turns for step in steps if step[0] in ("edit", "write")]
    blocks = []
    for kind, path, *texts in steps:
        old, new = (
            (texts[0] + "\n", texts[1] + "\n") if kind == "edit" else (task.before.get(path, ""), texts[0])
        )
        blocks.append(f"{path}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n")
    return "\n".join(blocks)


TOOLS: Mapping[str, Callable[[Step, Path], tuple[str, Call]]] = {
    "own": _own,
    "smolagents": _own,
    "claude": _claude,
    "opencode": _opencode,
    "codex": _codex,
    "codex_freeform": _codex_freeform,
    "aider": _own,
}
"""How agents call their tools."""


def prepared(
    tools: str, folder: Path, tasks: Sequence[Task] = TASKS
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Write the files that the tasks begin with.

    Args:
        tools: whose tools the model calls. With a driver's own each task is done twice, whole and streamed.
        folder: gets a folder for each task.
        tasks: which ones.

    Returns:
        What the model says in each task by its marker, and what the client shall do.
    """
    script, jobs = {}, []
    for task in tasks:
        for streamed in (False, True) if TOOLS[tools] is _own else (True,):
            own = folder / f"{task.name}-{'streamed' if streamed else 'whole'}"
            own.mkdir()
            for name, text in task.before.items():
                (own / name).write_text(text)
            job = {"request": task.request, "answer": ANSWER, "folder": str(own), "streamed": streamed}
            jobs.append({**job, "resumed": False})
            jobs += [{**job, "request": GO_ON, "resumed": True} for steps in task.turns if not steps]
            script[task.marker] = _turns(task, TOOLS[tools], own)
            if tools == "aider":
                script[task.marker] = [{"thought": "Hm.", "text": _blocks(task)}, {"text": ANSWER}]
            if tools == "smolagents":
                script[task.marker][-1] = {
                    "calls": [{"name": "final_answer", "arguments": {"answer": ANSWER}}]
                }
    return script, jobs


def _turns(task: Task, tool: Callable[[Step, Path], tuple[str, Call]], folder: Path) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for number, steps in enumerate(task.turns):
        if not steps:
            turns.append({"text": ANSWER})
            continue
        calls = [dict(zip(("name", "arguments"), tool(step, folder), strict=True)) for step in steps]
        turns.append({"thought": f"Turn {number}.", "text": "I go on.", "calls": calls})
    return [*turns, {"text": ANSWER}]


def differences(folder: Path) -> list[str]:
    """Return what is not as it should be at the end, in all folders of tasks."""
    found = []
    for task in (*TASKS, SESSION):
        for own in sorted(folder.glob(f"{task.name}-*")):
            for name, text in task.after.items():
                path = own / name
                got = path.read_text() if path.exists() else None
                found += [] if got == text else [f"{own.name}/{name} is {got!r}"]
    return found
