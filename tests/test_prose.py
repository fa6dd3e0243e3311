"""Comments and docstrings of the package can be read aloud, as far as a machine can tell."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A fragment that hangs on the sentence before it: "Of a row, the first".
_FRAGMENT = re.compile(r"(?:^|[.:;]\s+)Of [a-z]")


def prose(path: Path) -> list[str]:
    """Return the docstrings of a file, and its comments, neighbouring lines of them as one text."""
    source = path.read_text()
    found = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if token.start[0] == last + 1:
                found[-1] += f" {text}"
            else:
                found.append(text)
            last = token.start[0]
    return found


def test_no_sentence_begins_with_of() -> None:
    fragments = [
        f"{path.relative_to(ROOT)}: {text[match.start() : match.start() + 80]!r}"
        for path in sorted((ROOT / "octavo").rglob("*.py"))
        for text in prose(path)
        for match in _FRAGMENT.finditer(text)
    ]
    assert fragments == []


def test_a_fragment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text('"""A row. Of a row, the first."""\n# Rows: all.\n# Of which one. And\n# more.\nx = 1\n')
    found = [match.group() for text in prose(path) for match in _FRAGMENT.finditer(text)]
    assert found == [". Of a", ". Of w"]
