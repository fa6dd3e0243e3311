"""Environments that hold what one of pip's commands would install, and nothing else, made within a second.

What is installed is linked from the environment that runs the tests, by what distributions say they need.
"""

import os
import subprocess
import sysconfig
import tomllib
import venv
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class LinkedVenv:
    """A virtual environment to which distributions are linked."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.bin = folder / "bin"
        self._site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        self._linked: set[str] = set()

    def install_octavo(self, extras: Iterable[str]) -> None:
        """Do what `pip install -e '.[extras]'` does."""
        wanted = list(PROJECT["dependencies"])
        for extra in extras:
            wanted += PROJECT["optional-dependencies"][extra]
        self.install(wanted)
        (self._site / "octavo.pth").write_text(f"{ROOT}\n")
        for name, target in PROJECT["scripts"].items():
            module, function = target.split(":")
            script = f"#!{self.bin / 'python'}\nfrom {module} import {function}\n{function}()\n"
            (self.bin / name).write_text(script)
            (self.bin / name).chmod(0o755)

    def install(self, requirements: Iterable[str], *, alone: bool = False) -> None:
        """Do what `pip install REQUIREMENTS` does; alone: with --no-deps."""
        for text in requirements:
            requirement = Requirement(text)
            for extra in requirement.extras or {""}:
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    self._install(requirement.name, extra, alone)

    def _install(self, name: str, extra: str, alone: bool) -> None:
        if f"{name}[{extra}]" in self._linked:
            return
        self._linked.add(f"{name}[{extra}]")
        found = metadata.distribution(name)
        for path in _top_level(found):
            target = self._site / path.name
            if not target.exists():
                target.symlink_to(path)
        needed = [] if alone else map(Requirement, found.requires or ())
        for requirement in needed:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                for other in requirement.extras or {""}:
                    self._install(requirement.name, other, alone)

    def check(self) -> None:
        """Check that this Octavo is there, and pytest, which nobody needs who runs it, is not."""
        code = "import importlib.util as u, octavo; print(u.find_spec('pytest'), octavo.__file__)"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.bin / "python", "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["None", str(ROOT / "octavo" / "__init__.py")]


def _top_level(found: metadata.Distribution) -> Iterator[Path]:
    """Yield the folders and modules of a distribution beside which others lie, and its metadata."""
    names = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    for name in sorted(names):
        yield Path(str(found.locate_file(name)))
