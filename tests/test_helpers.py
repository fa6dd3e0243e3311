"""What several folders of tests import lies in tests/support: a test reaches into no other room's folder."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
# Scripts for a server under load, which start and measure it as those of stress do.
EXEMPT = {"server/clients/run.py"}


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


def reaches(tests: Path) -> list[str]:
    """Imports of a module that lies in another folder of tests than its importer, by path."""
    files = [path for path in sorted(tests.rglob("*.py")) if path.name != "conftest.py"]
    folders: dict[str, set[Path]] = {}
    for path in files:
        folders.setdefault(path.stem, set()).add(path.parent)
    found = []
    for path in sorted(tests.rglob("*.py")):
        for name in imported_by(path):
            homes = folders.get(name, set())
            if homes and not homes & {path.parent, tests / "support"}:
                found.append(f"{path.relative_to(tests).as_posix()} imports {name}")
    return found


def test_what_several_folders_import_lies_in_support() -> None:
    assert [each for each in reaches(TESTS) if each.split()[0] not in EXEMPT] == []


def test_what_reaches_into_another_folder_is_found(tmp_path: Path) -> None:
    for folder in ("support", "ops", "layers"):
        (tmp_path / folder).mkdir()
    (tmp_path / "support" / "shared.py").touch()
    (tmp_path / "ops" / "cases.py").write_text("import json, shared\n")
    (tmp_path / "layers" / "test_it.py").write_text("import shared\nfrom cases import one\n")
    (tmp_path / "layers" / "conftest.py").write_text("def later():\n    import cases\n")
    assert reaches(tmp_path) == [
        "layers/conftest.py imports cases",
        "layers/test_it.py imports cases",
    ]
