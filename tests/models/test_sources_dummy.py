"""Dummy weights: seeded, and the same in any slice."""

import pytest
import torch

from octavo.errors import UnsupportedModelError, WeightsError
from octavo.models.formats import dummy
from octavo.models.formats.dummy import DummyWeights

SHAPES = {
    "model.embed_tokens.weight": (300, 64),
    "model.layers.0.mlp.up_proj.weight": (40, 64),
    "model.layers.0.self_attn.q_proj.bias": (48,),
    "model.layers.0.input_layernorm.weight": (64,),
}
EMBEDDING = "model.embed_tokens.weight"


def read(name=EMBEDDING, seed=0, shapes=SHAPES, dtype=torch.float32, **parts):
    return DummyWeights(shapes, seed=seed).read(name, dtype=dtype, **parts)


def test_names_and_shapes():
    weights = DummyWeights(SHAPES)
    assert weights.names() == SHAPES.keys()
    assert all(weights.read(name, dtype=torch.float32).shape == shape for name, shape in SHAPES.items())
    with pytest.raises(WeightsError, match="did you mean"):
        weights.read("model.embed_token.weight", dtype=torch.float32)


def test_seed_and_name_decide():
    assert torch.equal(read(), read())
    assert not torch.equal(read(), read(seed=1))
    other = read("model.layers.0.mlp.up_proj.weight")
    assert not torch.equal(read(rows=slice(0, 40)), other)
    assert torch.equal(
        other, read("model.layers.0.mlp.up_proj.weight", shapes=dict(reversed(SHAPES.items())))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool_size", [None, 67, 1009])
def test_any_part_equals_that_part_of_the_whole(dtype, pool_size, monkeypatch):
    if pool_size:
        monkeypatch.setattr(dummy, "_POOL_SIZE", pool_size)
    whole = read(dtype=dtype)
    for rows in (None, slice(0, 1), slice(7, 300), slice(5, 5)):
        for columns in (None, slice(0, 10), slice(33, 64)):
            part = read(rows=rows, columns=columns, dtype=dtype)
            assert part.is_contiguous()
            assert torch.equal(part, whole[rows or slice(None), columns or slice(None)])
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(read(bias, rows=slice(9, 40)), read(bias)[9:40])


def test_distribution():
    weights = read(shapes={EMBEDDING: (3000, 1024)})
    assert weights.mean().abs() < 1e-4
    assert weights.std() == pytest.approx(0.02, rel=0.01)
    assert len(torch.unique(weights, dim=0)) == 3000
    # The pool is shorter than the tensor: what repeats must not be the row before.
    assert torch.corrcoef(weights[:64]).fill_diagonal_(0).abs().max() < 0.2


def test_norms_are_one():
    assert (read("model.layers.0.input_layernorm.weight") == 1).all()
    assert read("model.layers.0.input_layernorm.weight", rows=slice(0, 5)).shape == (5,)


def test_a_read_tensor_is_free_of_the_pool():
    weights = DummyWeights(SHAPES)
    before = weights.read(EMBEDDING, dtype=torch.float32)
    weights.read(EMBEDDING, dtype=torch.float32).zero_()
    assert torch.equal(weights.read(EMBEDDING, dtype=torch.float32), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_are_the_same_numbers_rounded(dtype):
    weights = DummyWeights(SHAPES)
    assert torch.equal(weights.read(EMBEDDING, dtype=dtype), read().to(dtype))
    assert torch.equal(weights.read(EMBEDDING, dtype=torch.float32), read())


def test_rows_longer_than_the_pool_are_refused():
    with pytest.raises(UnsupportedModelError, match="x of"):
        DummyWeights({"x": (1, 2**22)})


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_norm.weight",
        "pre_feedforward_layernorm_2.weight",
        "layer_scalar",
        "mlp.gate.scale",
        "mlp.gate.per_expert_scale",
    ],
)
def test_norms_and_factors_change_nothing(name):
    """Trap: a product of factors near 0 leaves nothing of the residual stream."""
    name = f"model.layers.3.{name}"
    assert read(name, shapes={name: (5,)}).equal(torch.ones(5))
