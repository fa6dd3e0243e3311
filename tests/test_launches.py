"""Every kernel that Octavo launches on a GPU, as its source names it: one more is a decision, no accident.

A launch gives its kernel all parameters, each by a name that it has: most launches run on no CPU.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "octavo"
NUM_LAUNCHED = 52
# What a launch gives Triton, beside the kernel's parameters.
OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def is_jit(decorator: ast.expr) -> bool:
    """Whether a decorator makes a kernel: triton.jit or gluon.jit, with options or without."""
    decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(decorator).split(".")[-1] == "jit"


def kernels_in(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {node.name: node for node in functions if any(map(is_jit, node.decorator_list))}


@cache
def all_kernels() -> frozenset[str]:
    return frozenset(name for tree in trees().values() for name in kernels_in(tree))


def launches_in(tree: ast.Module, kernels: frozenset[str] | set[str]) -> Iterator[tuple[str, ast.Call]]:
    """Kernels that a module launches, and the calls: launch(kernel, ...), or kernel[grid](...)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "launch":
            yield ast.unparse(node.args[0]), node
        elif isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value) in kernels:
            yield ast.unparse(node.func.value), node


def defined_in(tree: ast.Module, name: str, file: str) -> str:
    """Return the file that defines a name of a module: one that it imports the name from, or its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return node.module.removeprefix("octavo.").replace(".", "/") + ".py"
    return file


def launches() -> list[tuple[str, str, ast.Call]]:
    """(file that defines it, kernel, call) of each launch."""
    return [
        (defined_in(tree, name, file), name, call)
        for file, tree in trees().items()
        for name, call in launches_in(tree, all_kernels())
    ]


def mismatch(kernel: ast.FunctionDef, call: ast.Call) -> str | None:
    """Return what a launch gives too much or too little, or None if it fits its kernel."""
    parameters = [each.arg for each in (*kernel.args.posonlyargs, *kernel.args.args)]
    positional = call.args[2:] if isinstance(call.func, ast.Name) else call.args
    named = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    unknown = named - OPTIONS - set(parameters)
    if unknown:
        return f"no parameters: {sorted(unknown)}"
    splats = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
    overlaps = any(splat.startswith("overlap_options(") for splat in splats)
    # Any other splat gives arguments that only a run knows.
    starred = any(isinstance(each, ast.Starred) for each in positional)
    is_open = starred or len(splats) > overlaps
    required = parameters[: len(parameters) - len(kernel.args.defaults)]
    missing = [] if is_open else [name for name in required[len(positional) :] if name not in named]
    if overlaps:
        missing = [name for name in missing if name != "OVERLAP"]
    twice = [] if starred else sorted(named & set(parameters[: len(positional)]))
    return f"missing {missing}, twice {twice}" if missing or twice else None


def test_launched_kernels_are_counted() -> None:
    found = {(file, name) for file, name, _ in launches()}
    listed = "\n".join(f"{file} {name}" for file, name in sorted(found))
    assert len(found) == NUM_LAUNCHED, f"{len(found)} kernels are launched:\n{listed}"


def test_every_launch_names_a_kernel() -> None:
    """A launch of anything but a kernel by its name would escape the count."""
    unknown = {(file, name) for file, name, _ in launches() if name not in kernels_in(trees()[file])}
    assert unknown == set()


def test_launches_fit_their_kernels() -> None:
    problems = {
        (file, name, call.lineno): mismatch(kernels_in(trees()[file])[name], call)
        for file, name, call in launches()
    }
    assert {place: problem for place, problem in problems.items() if problem} == {}


def test_other_ways_to_launch_are_found() -> None:
    source = "@gluon.jit(do_not_specialize=[])\ndef f(x): ...\nf[grid](1)\nlaunch(g, (1,), 2)\nlaunches(h)"
    tree = ast.parse(source)
    assert {name for name, _ in launches_in(tree, set(kernels_in(tree)))} == {"f", "g"}


def test_launches_that_do_not_fit_are_found() -> None:
    (kernel,) = ast.parse("def f(x, y, OVERLAP): ...").body
    assert isinstance(kernel, ast.FunctionDef)

    def found(arguments: str) -> str | None:
        call = ast.parse(f"launch(f, (1,), {arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        return mismatch(kernel, call)

    assert found("1, y=2, num_warps=4, **overlap_options(x)") is None
    assert found("*both, OVERLAP=True") is None
    assert found("1, **common") is None
    assert found("1, y=2") == "missing ['OVERLAP'], twice []"
    assert found("1, **overlap_options(x)") == "missing ['y'], twice []"
    assert found("1, x=2, y=3, **common") == "missing [], twice ['x']"
    assert found("1, 2, z=3, **common") == "no parameters: ['z']"
