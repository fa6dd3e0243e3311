"""The documents' Python blocks and the examples run as they stand; documents cite files that exist."""

import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = (
    "README.md",
    "docs/coming-from.md",
    "docs/operators.md",
    "docs/package.md",
    "docs/structured-output.md",
)
"""Documents whose every block is a program."""
BLOCKS = [
    pytest.param(block, id=f"{name}-{index}")
    for name in PROGRAMS
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL))
]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
# A result file by its full name or without its date: h200-7d5c172-gpu_forest, h200-7d5c172-gpu_serving-*.
CITATION = re.compile(r"[a-z0-9-]+-[0-9a-f]{7,8}-[a-z0-9_.*-]+[a-z0-9*]|\*prefix_accuracy\*")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, loads_once: None) -> Iterator[None]:
    """A place to run programs in: at the root, beside the examples, which are forgotten afterwards."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield
    for path in EXAMPLES:
        sys.modules.pop(path.stem, None)


# In this process: to import torch takes longer than most of them.
@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run(block: str, tmp_path: Path) -> None:
    path = tmp_path / "block.py"
    path.write_text(block)
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("name", PROGRAMS)
def test_documents_have_blocks(name: str) -> None:
    assert any(block.id.startswith(name) for block in BLOCKS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def cited_by(path: Path) -> dict[str, list[Path]]:
    """Result files by citation in a document, with their dates left out."""
    citations = CITATION.findall(path.read_text())
    names = {cited: re.sub(r"^[\d-]{11}|\.json$", "", cited) for cited in citations}
    return {cited: [r for r in RESULTS if fnmatch(r.stem[11:], name)] for cited, name in names.items()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_result_files_that_are_cited_exist(path: Path) -> None:
    assert [cited for cited, found in cited_by(path).items() if not found] == []


def test_result_files_are_cited_or_the_only_other_of_their_benchmark_and_machine() -> None:
    """Of the files that nobody cites only the newest one is kept."""
    cited = {result for path in DOCUMENTS for found in cited_by(path).values() for result in found}
    others = Counter(re.sub(r"-[0-9a-f]{7,8}-", " ", r.stem[11:]) for r in RESULTS if r not in cited)
    assert [benchmark for benchmark, num in others.items() if num > 1] == []


def named_files(text: str) -> set[str]:
    """Paths in backticks, such as `kv/manager.py`; `{a,b}.py` are two."""
    paths = set()
    for path in re.findall(r"`([\w/{},.]+\.(?:py|c))`", text):
        begin, *rest = re.split(r"[{}]", path)
        paths |= {begin + name + rest[1] for name in rest[0].split(",")} if rest else {path}
    return paths


def test_architecture_names_files_that_exist() -> None:
    files = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("octavo", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.*")
    ]
    named = named_files((ROOT / "ARCHITECTURE.md").read_text())
    assert {"gemm/portable/skinny.py", "gemm/hopper/floats/dense_gemm.py"} <= named
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in files)] == []


GUIDES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_guides_can_be_read_aloud(path: Path) -> None:
    """Lines fit a screen, tables included, and no sentence of the text begins with "Of"."""
    text = path.read_text()
    assert [line for line in text.splitlines() if len(line) > 140] == []
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"(?:^|[.:;!?]\s|^\s*[*-] )Of [^\n]*", prose, re.MULTILINE) == []
