"""What messages say to install works where it is read: in a checkout, after pip has installed from one."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import install_hint

ROOT = Path(__file__).parent.parent
TEXTS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.*")]


def test_in_a_checkout_it_is_the_checkout() -> None:
    command = shlex.split(install_hint.install_extra("otel"))
    assert command == [sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[otel]"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (None, "'octavo[otel]'"),
        ("file://{tmp}/a%20folder", "'{tmp}/a folder[otel]'"),
        ("file://{tmp}/gone", "'.[otel]', in a checkout of Octavo"),
        ("https://127.0.0.1/octavo.whl", "'octavo[otel]'"),
    ],
)
def test_elsewhere_it_is_where_pip_found_octavo(url: str | None, expected: str, tmp_path: Path) -> None:
    """A copy of the module beside metadata as pip writes it."""
    (tmp_path / "a folder").mkdir()
    site = tmp_path / "site"
    (site / "octavo").mkdir(parents=True)
    (site / "octavo" / "__init__.py").touch()
    shutil.copy(ROOT / "octavo" / "install_hint.py", site / "octavo")
    info = site / "octavo-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: octavo\nVersion: 0.1.0\n")
    if url is not None:
        (info / "direct_url.json").write_text(json.dumps({"url": url.format(tmp=tmp_path), "dir_info": {}}))
    code = f"import sys; sys.path.insert(0, {str(site)!r})\nfrom octavo import install_hint as hint\n"
    code += "print(hint.install_extra('otel'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().removeprefix(f"{sys.executable} -m pip install ") == expected.format(
        tmp=tmp_path
    )


def test_no_text_installs_octavo_by_name() -> None:
    """It is not published: from an index pip would take what somebody else calls so."""
    for path in TEXTS:
        if path.suffix in (".md", ".yaml", ".py", ""):
            found = re.findall(r"pip install[^\n`]*['\" ]octavo(?:\[|['\" `\n])", path.read_text())
            assert not found, f"{path}: {found}"
    for path in (ROOT / "octavo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "pip install" not in node.value, f"{path}: {node.value!r}; see octavo/install_hint.py"


def test_a_missing_extra_is_named_with_its_command() -> None:
    """Every extra that messages speak of is one that pyproject.toml has."""
    asked = {
        extra
        for path in (ROOT / "octavo").rglob("*.py")
        for extra in re.findall(r"install_extra\(['\"](\w+)['\"]\)", path.read_text())
    }
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert {"hf", "plot", "server", "structured", "otel", "bench"} <= asked <= known
