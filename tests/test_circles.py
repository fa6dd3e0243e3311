"""Files of the package import each other in one direction only; imports inside functions count, too."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "octavo"

Graph = Mapping[str, Set[str]]
Circle = frozenset[str]


def test_files_import_each_other_in_no_circle() -> None:
    found = circles(import_graph(PACKAGE))
    described = "\n".join(f"{len(circle)} files: {', '.join(sorted(circle))}" for circle in found)
    assert not found, described


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("from package.other import f", "import package.one", True),
        ("def f():\n    from package import other", "from package.one import f", True),
        ("from .other import f", "class C:\n    def f(self):\n        from . import one", True),
        ("try:\n    import package.other\nexcept ImportError:\n    pass", "from package.one import f", True),
        ("if TYPE_CHECKING:\n    from package.other import C", "from package.one import f", False),
        ("if typing.TYPE_CHECKING:\n    from package import other", "import package.one", False),
        ("if not TYPE_CHECKING:\n    from package import other", "import package.one", True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from package import other", "import package.one", True),
        ("import package.other", "import json", False),
    ],
)
def test_circles_of_two_files_are_found(tmp_path: Path, one: str, other: str, expected: bool) -> None:
    package = make_package(tmp_path, {"__init__": "", "one": one, "other": other})
    assert circles(import_graph(package)) == [{"package.one", "package.other"}] * expected


def test_a_package_is_imported_where_it_is_named(tmp_path: Path) -> None:
    """A module may import its neighbours, whatever __init__.py imports, but not names of its package."""
    files = {"__init__": "from package.one import f", "one": "from package import other", "other": ""}
    assert circles(import_graph(make_package(tmp_path, files))) == []
    files["other"] = "from package import f"
    package = make_package(tmp_path, files)
    assert circles(import_graph(package)) == [{"package", "package.one", "package.other"}]


def test_long_circles_are_found_whole_and_apart() -> None:
    ring = {f"ring{number}": {f"ring{(number + 1) % 2000}"} for number in range(2000)}
    pair = {"one": {"other", "ring0"}, "other": {"one"}, "single": {"one"}}
    assert circles({**ring, **pair}) == [set(ring), {"one", "other"}]


def make_package(folder: Path, files: Mapping[str, str]) -> Path:
    package = folder / "package"
    package.mkdir(exist_ok=True)
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return package


def import_graph(package: Path) -> dict[str, set[str]]:
    """Return which modules of a package each of its modules imports when it runs."""
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    return {name: set(imports_of(name, path, files)) - {name} for name, path in files.items()}


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in running_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = name.split(".")[: None if path.name == "__init__.py" else -1]
                above = above[: len(above) - node.level + 1]
                source = ".".join([*above, *filter(None, [node.module])])
            names = (f"{source}.{alias.name}" for alias in node.names)
            yield from (
                found for found in {found if found in files else source for found in names} if found in files
            )


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that only a checker of types reads."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        )
        waiting += node.orelse if is_for_types else ast.iter_child_nodes(node)


def circles(graph: Graph) -> list[Circle]:
    """Return the groups of nodes that reach each other, the largest first.

    Source: Kosaraju's algorithm (M. Sharir, A strong-connectivity algorithm, 1981).
    """
    backwards: dict[str, set[str]] = {}
    for name, targets in graph.items():
        for target in targets:
            backwards.setdefault(target, set()).add(name)
    seen: set[str] = set()
    groups = [
        frozenset(finished([name], backwards, seen)) for name in reversed(list(finished(graph, graph, set())))
    ]
    return sorted((group for group in groups if len(group) > 1), key=len, reverse=True)


def finished(starts: Iterable[str], graph: Graph, seen: set[str]) -> Iterator[str]:
    """Yield each node that can be reached after all that can be reached from it, without recursion."""
    for start in starts:
        stack = [] if start in seen else [(start, iter(graph.get(start, ())))]
        seen.add(start)
        while stack:
            targets = stack[-1][1]
            target = next((target for target in targets if target not in seen), None)
            if target is None:
                yield stack.pop()[0]
            else:
                seen.add(target)
                stack.append((target, iter(graph.get(target, ()))))
