"""Tables and the chart of documents are what result files say; a figure that somebody types is found."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def benchmarks_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_tables_and_the_chart_are_what_the_result_files_say() -> None:
    import tables

    changed = [path.name for path, text in tables.made().items() if path.read_text() != text]
    assert changed == [], "run: python benchmarks/tables.py"


def test_every_table_is_shown_once_and_closed() -> None:
    import tables

    text = "".join(path.read_text() for path in tables.PAGES)
    assert sorted(found[1] for found in tables.MARKED.findall(text)) == sorted(tables.TABLES)
    assert text.count("<!-- table: ") == text.count("<!-- end -->") == len(tables.TABLES)


def test_a_figure_that_was_typed_is_found_and_mended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tables

    page = tmp_path / "performance.md"
    typed = re.sub(r"64,083", "99,999", tables.PAGES[1].read_text())
    page.write_text(typed)
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert (tables.main(), page.read_text()) == (1, typed)
    assert "performance.md is out of date" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["tables.py"])
    assert (tables.main(), page.read_text()) == (0, tables.filled(typed))
    assert "64,083" in page.read_text()


def test_files_of_a_table_are_of_one_commit() -> None:
    """The line below a table names files; those of one table differ in their benchmark alone."""
    import tables

    for name in tables.TABLES.keys() - {"left-out-fields", "left-out-tools", "left-out-items", "refused"}:
        table = tables.TABLES[name]
        commits = set(re.findall(r"`[\w.-]+?-([0-9a-f]{7,})-[\w.*-]+`", table()))
        assert len(commits) == 1 or name == "readme", name
