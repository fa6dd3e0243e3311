"""The table of products: that it is whole, that it is the only chooser, and that each row can be launched."""

import ast
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
import triton_layer_cases  # noqa: F401  (skips where there is no Triton)

import octavo
from octavo.forms.base import StackShape, Storage
from octavo.gemm.explain import explain, explain_experts
from octavo.gemm.product import MANY, Target, available, find, load
from octavo.gemm.table import EXPERT_LAYERS, EXPERTS, LAYERS, PRODUCTS

META = torch.device("meta")
STORAGES = {
    "float8": [
        Storage("float8", 1),
        Storage("float8", 1, tile=(128, 128)),
        Storage("float8", 1, tile=(32, 32)),
    ],
    "packed": [Storage("blocks", 1, bits=bits, tile=(1, 64)) for bits in (4, 8)],
}


def weights(form: str) -> Iterator[object]:
    """Yield weights of a form, with sizes on both sides of limits."""
    for shape in ((64, 128), (2056, 1056), (4096, 4096), (65536, 512), (24, 26752)):
        if form in ("floats", "router"):
            yield from (
                torch.empty(shape, dtype=dtype, device=META) for dtype in (torch.bfloat16, torch.float32)
            )
        else:
            layer = next(each for each in chain(*LAYERS.values()) if each.form == form and each.blank)
            yield from (layer.blank(shape, storage, META) for storage in STORAGES[form])


@pytest.mark.parametrize("generation", [8, 9, 10, 12])
@pytest.mark.parametrize("form", ["floats", "float8", "packed", "router"])
def test_any_number_of_rows_has_a_product(form: str, generation: int) -> None:
    for weight in weights(form):
        products = available(PRODUCTS[form], weight, generation)
        assert all(product.generation in (0, generation) for product in products)
        for rows in (0, 1, 2, 4, 5, 16, 17, 64, 65, 256, 257, 100_000):
            x = torch.empty(rows, weight.shape[1], dtype=torch.bfloat16, device=META)  # type: ignore[attr-defined]
            for is_gated in (False, True):
                least, most = find(products, x, weight, is_gated=is_gated).rows
                assert least <= rows <= most


def test_the_rows_of_a_table_say_why_and_can_be_launched() -> None:
    for product in chain(*PRODUCTS.values(), *EXPERTS.values()):
        assert product.why
        assert product.rows[0] <= product.rows[1]
    on_gpu = chain(*(PRODUCTS[form] for form in ("floats", "float8", "packed", "router")))
    assert all(callable(product.run) for product in on_gpu)
    functions = {
        "gemv": ["gemv"],
        "few": ["pair_gate_up", "pair_down"],
        "grouped": ["grouped_gemm"],
        "rounded": ["grouped_gemm"],
        "persistent": ["expert_gemm"],
    }
    for product in chain(*EXPERTS.values()):
        assert all(callable(product.part(name)) for name in functions[product.name])
    for kind, layers in LAYERS.items():
        assert kind == "router" or all(callable(load(layer.make)) for layer in layers)


def test_on_a_cpu_a_row_is_a_method_of_its_layer() -> None:
    for form, layer in (("bfloat16", "bf16"), ("float8 on a CPU", "float8")):
        (maker,) = (each.make for each in LAYERS[layer] if each.form == form)
        module = load(maker).__module__
        source = (
            Path(str(octavo.__file__)).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
        )
        assert all(product.launch in source for product in PRODUCTS[form])


def test_nothing_else_chooses_products() -> None:
    """No function of the rooms that make and launch products is named as a chooser of them."""
    root = Path(str(octavo.__file__)).parent
    for path in chain(*(root.joinpath(room).rglob("*.py") for room in ("gemm", "forms", "layers"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not _is_kernel(node):
                assert not node.name.startswith(("choose_", "_choose_")), f"{path}: {node.name}"


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.dump(decorator) for decorator in function.decorator_list)


def test_a_named_generation_is_explained_without_one() -> None:
    hopper = Target(torch.device("cuda"), torch.bfloat16, (9, 0))
    found = explain("floats", (4096, 1024), hopper)
    assert [(each.rows, each.product.rpartition(":")[2]) for each in found] == [
        ((1, 1), "gemv_linear"),
        ((2, 64), "hopper_linear"),
        ((65, 128), "hopper_linear"),
        ((129, MANY), "linear"),
    ]
    ampere = Target(torch.device("cuda"), torch.bfloat16, (8, 0))
    assert [each.rows for each in explain("floats", (4096, 1024), ampere)] == [(1, 1), (2, 4), (5, MANY)]
    # Float8 needs 8.9: before, such weights are dequantised.
    storage = STORAGES["float8"][0]
    assert [each.product for each in explain("float8", (64, 128), ampere, storage=storage)] == ["dequantised"]
    packed = explain("blocks", (64, 128), hopper, storage=STORAGES["packed"][0], is_gated=True)
    assert [each.rows for each in packed] == [(1, 16), (17, 256), (257, MANY)]


@pytest.mark.parametrize("kind", ["floats", "float8", "mxfp4", "blocks"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_experts_of_a_named_generation(kind: str, capability: tuple[int, int]) -> None:
    target = Target(torch.device("cuda"), torch.bfloat16, capability)
    storage = {"blocks": Storage("blocks", 1, bits=4, tile=(1, 128)), "float8": Storage("float8", 1)}.get(
        kind
    )
    shapes = (64, 1536, 2048), (64, 2048, 768)
    found = explain_experts((kind, kind), shapes, 8, target, storages=(storage, storage))
    names = [each.product.rpartition(":")[2] for each in found]
    assert ("gemv" in names) == (capability[0] == 9)
    assert ("persistent" in names) == (capability[0] == 9 and kind == "mxfp4")
    assert found[0].rows[0] == 1
    assert found[-1].rows[1] == MANY
    for before, after in pairwise(found):
        assert after.rows[0] == before.rows[1] + 1
    if "persistent" in names:
        # More than 48 rows of an expert: 8 of 64 experts for each token.
        assert found[names.index("persistent")].rows == (385, MANY)
    deterministic = explain_experts(
        (kind, kind), shapes, 8, target, storages=(storage, storage), deterministic=True
    )
    assert [each.product.rpartition(":")[2] for each in deterministic] == ["grouped"]


def test_stacks_have_the_shape_that_blanks_promise() -> None:
    """What inspection describes is what loading makes: the same form of the same shape."""
    shape = StackShape(3, 64, 128, 2, torch.bfloat16, META)
    for kind, layer in EXPERT_LAYERS.items():
        storage = Storage(kind, 1, bits=4, tile=(1, 128))
        blank = layer.blank.blank(shape, storage)
        assert blank.shape == (3, 64, 128)
        assert blank.kind == layer.form
