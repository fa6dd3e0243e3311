"""Every kernel that Octavo launches on a GPU, as its source names it: one more is a decision, no accident."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "octavo"
NUM_LAUNCHED = 58


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def is_jit(decorator: ast.expr) -> bool:
    """Whether a decorator makes a kernel: triton.jit or gluon.jit, with options or without."""
    decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(decorator).split(".")[-1] == "jit"


def kernels_in(tree: ast.Module) -> set[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if any(map(is_jit, node.decorator_list))}


def launched_in(tree: ast.Module, kernels: set[str]) -> Iterator[str]:
    """Names of kernels that a module launches: launch(kernel, ...), or kernel[grid](...)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "launch":
            yield ast.unparse(node.args[0])
        elif isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value) in kernels:
            yield ast.unparse(node.func.value)


def imported_from(tree: ast.Module, name: str, file: str) -> str:
    """Return where a name in a module comes from: another module, or the file itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return node.module.removeprefix("octavo.").replace(".", "/") + ".py"
    return file


def launched() -> set[tuple[str, str]]:
    """(file, name) of each launched kernel."""
    modules = trees()
    kernels = set().union(*map(kernels_in, modules.values()))
    return {
        (imported_from(tree, name, file), name)
        for file, tree in modules.items()
        for name in launched_in(tree, kernels)
    }


def test_launched_kernels_are_counted() -> None:
    found = launched()
    listed = "\n".join(f"{file} {name}" for file, name in sorted(found))
    assert len(found) == NUM_LAUNCHED, f"{len(found)} kernels are launched:\n{listed}"


def test_every_launch_names_a_kernel() -> None:
    """A launch of anything but a kernel by its name would escape the count."""
    modules = trees()
    unknown = {(file, name) for file, name in launched() if name not in kernels_in(modules[file])}
    assert unknown == set()


def test_other_ways_to_launch_are_found() -> None:
    source = "@gluon.jit(do_not_specialize=[])\ndef f(x): ...\nf[grid](1)\nlaunch(g, (1,), 2)\nlaunches(h)"
    tree = ast.parse(source)
    assert set(launched_in(tree, kernels_in(tree))) == {"f", "g"}
