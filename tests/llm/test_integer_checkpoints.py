"""Models of AWQ, GPTQ and compressed-tensors checkpoints, against the network that their numbers mean."""

import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_checkpoints import CONFIG, FIELDS, awq_fields, compressed_fields, gptq_fields, make, write
from torch import Tensor

from octavo import LLM
from octavo.config import EngineConfig
from octavo.engine.memory import plan_execution
from octavo.engine.step.result import LateWork
from octavo.errors import ConfigError, UnsupportedModelError, WeightsError
from octavo.models import ModelConfig, open_weights, read_config, resolve_model, stored_matrices
from octavo.models.weights import QuantisedSource

PREFIX, CONTINUATIONS = [1, 5, 7, 9], [[3, 8, 60, 2, 44], [90, 0, 12, 31, 5]]
LAYER = "model.layers.1.mlp.down_proj"


def logprobs(model: str, **options: Any) -> Tensor:
    llm = LLM(model, device="cpu", num_blocks=64, block_size=4, **options)
    return torch.tensor([each.token_logprobs for each in llm.score(PREFIX, CONTINUATIONS)])


@pytest.mark.parametrize("name", FIELDS)
def test_a_model_is_what_its_numbers_mean(tmp_path: Path, name: str) -> None:
    stored, meant = make(FIELDS[name])
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": FIELDS[name]})
    expected = logprobs(write(tmp_path / "meant", meant, CONFIG))
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)
    # Products with packed weights round activations to 8 bits.
    error = (logprobs(model) - expected).abs().max().item()
    assert error < (1e-5 if name == "gptq-odd" else 0.15)
    assert (error > 1e-5) == (name != "gptq-odd")


def mixed() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """A checkpoint in four ways: 4 bits in two groups, 8 bits, float8."""
    ways = {
        "attn": compressed_fields(32, symmetric=False),
        "gate": compressed_fields(-1, bits=8),
        "1.mlp.down": compressed_fields(64),
    }
    stored, meant = make(ways["attn"])
    for part in ("gate", "1.mlp.down"):
        other, its_meaning = make(ways[part])
        stored = {name: each for name, each in stored.items() if part not in name}
        stored |= {name: each for name, each in other.items() if part in name}
        meant |= {name: each for name, each in its_meaning.items() if part in name}
    for layer in ("0.mlp.up_proj", "1.mlp.up_proj", "0.mlp.down_proj"):
        name = f"model.layers.{layer}.weight"
        stored = {each: values for each, values in stored.items() if layer not in each}
        scale = meant[name].abs().amax(1, keepdim=True) / 448
        stored[name] = (meant[name] / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = scale
        meant[name] = stored[name].float() * scale
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    groups = {
        name: way["config_groups"]["group_0"] | {"format": "pack-quantized", "targets": [f"re:.*{name}.*"]}
        for name, way in ways.items()
    }
    groups["rest"] = {"targets": ["Linear"], "weights": weights, "format": "naive-quantized"}
    return stored, meant, ways["attn"] | {"config_groups": groups, "format": "mixed-precision"}


def test_a_matrix_may_have_a_single_scale(tmp_path: Path) -> None:
    stored, meant = make(FIELDS["w8a8"])
    for name in [each for each in stored if each.endswith("_scale")]:
        weight = name.removesuffix("_scale")
        stored[name] = stored[name][:1, 0].clone()
        meant[weight] = stored[weight] * stored[name].float()
    (group,) = FIELDS["w8a8"]["config_groups"].values()
    group = group | {"weights": group["weights"] | {"strategy": "tensor"}}
    fields = CONFIG | {"quantization_config": FIELDS["w8a8"] | {"config_groups": {"a": group}}}
    expected = logprobs(write(tmp_path / "meant", meant, CONFIG))
    model = write(tmp_path / "stored", stored, fields)
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)


def test_integers_beyond_their_bits_are_refused_by_name(tmp_path: Path) -> None:
    stored, _ = make(FIELDS["w4a8"])
    stored[f"{LAYER}.weight"][3, 5] = 8
    model = write(tmp_path, stored, CONFIG | {"quantization_config": FIELDS["w4a8"]})
    with pytest.raises(WeightsError, match=f"{LAYER}.weight must hold integers of 4 bits"):
        LLM(model, device="cpu")


@pytest.mark.parametrize("name", ["gptq-asymmetric", "gptq-128", "awq-32"])
def test_auto_round_has_layouts_of_others(tmp_path: Path, name: str) -> None:
    stored, meant = make(FIELDS[name])
    own = {each: FIELDS[name][each] for each in ("bits", "group_size", "sym") if each in FIELDS[name]}
    own |= {"quant_method": "auto-round", "packing_format": f"auto_round:auto_{name.split('-')[0]}"}
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": own})
    expected = logprobs(write(tmp_path / "meant", meant, CONFIG))
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)


def test_matrices_may_be_quantised_in_several_ways(tmp_path: Path) -> None:
    stored, meant, fields = mixed()
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": fields})
    expected = logprobs(write(tmp_path / "meant", meant, CONFIG))
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)
    assert 1e-5 < (logprobs(model) - expected).abs().max().item() < 0.15


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_layers_of_gptq_may_have_other_numbers(tmp_path: Path, form: str) -> None:
    """As `dynamic` says: an LM head in 8 bits, a layer left as it is, others without zeros of their own."""
    usual, others = gptq_fields(64, form=form), gptq_fields(32, bits=8, sym=False, desc_act=True, form=form)
    stored, meant = make(usual)
    different, its_meaning = make(others, also=("lm_head.weight",))
    kept = "model.layers.0.mlp.up_proj"
    for part in ("lm_head", "down_proj"):
        stored = {name: each for name, each in stored.items() if part not in name}
        stored |= {name: each for name, each in different.items() if part in name}
        meant |= {name: each for name, each in its_meaning.items() if part in name}
    stored = {name: each for name, each in stored.items() if kept not in name}
    stored[f"{kept}.weight"] = meant[f"{kept}.weight"]
    settings = {name: others[name] for name in ("bits", "group_size", "sym", "desc_act")}
    dynamic = {"lm_head": settings, r"+:.*down_proj": settings, rf"-:{kept}": {}}
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": usual | {"dynamic": dynamic}})
    expected = logprobs(write(tmp_path / "meant", meant, CONFIG))
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)
    assert 1e-5 < (logprobs(model) - expected).abs().max().item() < 0.2


@pytest.mark.parametrize(
    ("name", "damaged", "named"),
    [
        (
            "0.self_attn.q_proj.weight_scale",
            lambda it: it[:, 1:],
            "q_proj.weight_scale is [128, 3], expected",
        ),
        (
            "0.self_attn.q_proj.weight_scale",
            lambda it: it[0, 0].clone(),
            "q_proj.weight_scale is [1], expected",
        ),
        (
            "0.self_attn.q_proj.weight_shape",
            lambda it: it[0].clone(),
            "q_proj.weight_shape is [1], expected [2]",
        ),
        ("0.self_attn.q_proj.weight_packed", lambda it: it[0].clone(), "q_proj.weight_packed is "),
        ("0.mlp.up_proj.weight", lambda it: it[0].clone(), "up_proj.weight is [128], expected 2 dimensions"),
        (
            "0.mlp.up_proj.weight_scale",
            lambda it: it[1:].clone(),
            "up_proj.weight_scale is [255, 1], expected",
        ),
    ],
)
def test_a_matrix_that_fits_none_of_several_ways_is_refused_by_name(
    tmp_path: Path, name: str, damaged: Callable[[Tensor], Tensor], named: str
) -> None:
    stored, _, fields = mixed()
    stored[f"model.layers.{name}"] = damaged(stored[f"model.layers.{name}"])
    model = write(tmp_path, stored, CONFIG | {"quantization_config": fields})
    with pytest.raises(WeightsError, match=re.escape(named)):
        LLM(model, device="cpu")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["awq-32", "gptq-ordered", "compressed-ordered"])
def test_embeddings_and_lm_heads_may_be_packed(tmp_path: Path, name: str, tied: bool) -> None:
    """Trap: rows of a weight whose columns were sorted by their groups are looked up in the model's order."""
    config = CONFIG | {"tie_word_embeddings": tied}
    names = ["model.embed_tokens", *([] if tied else ["lm_head"])]
    stored, meant = make(FIELDS[name], config, also=tuple(f"{each}.weight" for each in names))
    assert all(f"{each}.weight" not in stored for each in names)
    model = write(tmp_path / "stored", stored, config | {"quantization_config": FIELDS[name]})
    expected = logprobs(write(tmp_path / "meant", meant, config))
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)
    # In a wrong order it is more than 1.
    assert 1e-5 < (logprobs(model) - expected).abs().max().item() < 0.5


@pytest.mark.parametrize(
    "name", ["awq-32", "gptq-v2", "gptq-8-asymmetric", "compressed-asymmetric", "w8a8-asymmetric"]
)
def test_parts_are_those_of_the_whole(tmp_path: Path, name: str) -> None:
    """What a rank reads: rows anywhere, columns between groups."""
    stored, meant = make(FIELDS[name])
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": FIELDS[name]})
    weights = open_weights(resolve_model(model))
    assert isinstance(weights, QuantisedSource)
    for rows, columns in ((slice(5, 77), slice(64, 192)), (slice(64, 128), None), (None, slice(128, 256))):
        got = weights.read_quantised(f"{LAYER}.weight", rows=rows, columns=columns).dequantise()
        exact = meant[f"{LAYER}.weight"][rows or slice(None), columns or slice(None)]
        torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("awq-64", "between groups of 64 columns, not into columns 0 to 32"),
        ("gptq-ordered", "use one rank"),
    ],
)
def test_columns_that_cannot_be_cut_are_refused(tmp_path: Path, name: str, message: str) -> None:
    stored, _ = make(FIELDS[name])
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": FIELDS[name]})
    weights = open_weights(resolve_model(model))
    assert isinstance(weights, QuantisedSource)
    with pytest.raises(ConfigError, match=message):
        weights.read_quantised(f"{LAYER}.weight", columns=slice(0, 32))


@pytest.mark.parametrize("name", ["awq-128", "gptq-32", "gptq-ordered", "compressed-8", "gptq-odd"])
def test_the_plan_knows_the_bytes(tmp_path: Path, name: str) -> None:
    """Planned before anything is read: what the loaded layers hold."""
    stored, _ = make(FIELDS[name])
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": FIELDS[name]})
    source = resolve_model(model)
    matrices = stored_matrices(source)
    plan = plan_execution(
        EngineConfig(model=model, device="cpu"), ModelConfig.from_hf(read_config(source)), stored=matrices
    )
    weights = open_weights(source)
    assert isinstance(weights, QuantisedSource)
    num_bytes = 0.0
    for matrix in matrices:
        blocks = weights.read_quantised(matrix).in_blocks()
        if name == "gptq-odd":
            num_bytes += 4 * blocks.quants.numel()
            continue
        parts = [each for each in (blocks.scales, blocks.mins, blocks.order) if each is not None]
        num_bytes += blocks.quants.numel() * blocks.bits / 8 + sum(each.nbytes for each in parts)
    others = sum(4 * values.numel() for each, values in stored.items() if each in weights.names())
    assert plan.weight_bytes == pytest.approx(num_bytes + others, abs=1)


def _without(part: str) -> dict[str, Tensor | None]:
    return {part: None}


# Fields, what differs in the file under the layer's name, the error, and what it names.
DAMAGED: list[tuple[dict[str, Any], dict[str, Tensor | None], type[Exception], str]] = [
    (awq_fields(32), _without("qzeros"), WeightsError, f"lacks {LAYER}.qzeros, which belongs to"),
    (awq_fields(32), _without("scales"), WeightsError, f"lacks {LAYER}.scales"),
    (awq_fields(32), _without("qweight"), UnsupportedModelError, f"{LAYER}.qzeros has the type I32"),
    (awq_fields(32), {"scales": torch.ones(2, 128)}, WeightsError, "scales is [2, 128], expected [8, 128]"),
    (awq_fields(32), {"scales": torch.full((8, 128), torch.inf)}, WeightsError, "must hold finite numbers"),
    (awq_fields(32), {"qweight": torch.ones(256, 16)}, UnsupportedModelError, "qweight has the type F32"),
    (awq_fields(32), {"qweight": torch.ones(5, dtype=torch.int32)}, WeightsError, "expected 2 dimensions"),
    (awq_fields(32), {"weight": torch.ones(128, 256)}, WeightsError, f"has {LAYER}.weight twice"),
    (gptq_fields(32), {"weight": torch.ones(128, 256)}, WeightsError, f"has {LAYER}.weight twice"),
    (compressed_fields(32), {"weight": torch.ones(128, 256)}, WeightsError, f"has {LAYER}.weight twice"),
    (awq_fields(96), {}, WeightsError, "columns, which groups of 96 do not divide"),
    (gptq_fields(32), _without("qzeros"), WeightsError, f"lacks {LAYER}.qzeros"),
    (gptq_fields(32, desc_act=True), _without("g_idx"), WeightsError, f"lacks {LAYER}.g_idx"),
    (gptq_fields(32), {"g_idx": torch.arange(256).int()}, WeightsError, "groups in [0, 8), got 0 to 255"),
    (gptq_fields(32), {"g_idx": -torch.ones(256).int()}, WeightsError, f"{LAYER}.g_idx must hold groups"),
    (gptq_fields(32), {"g_idx": torch.zeros(256).int()}, WeightsError, "each group 32 times, got 0 to 256"),
    (gptq_fields(32), {"g_idx": torch.arange(256).int() % 8}, WeightsError, "says desc_act = false"),
    (gptq_fields(32), {"g_idx": torch.zeros(8).int()}, WeightsError, "g_idx is [8], expected [256]"),
    (
        gptq_fields(32),
        {"qweight": torch.zeros(32, 64, dtype=torch.int32)},
        WeightsError,
        "qzeros is [8, 16], expected [8, 8]",
    ),
    (compressed_fields(32), _without("weight_shape"), WeightsError, f"lacks {LAYER}.weight_shape"),
    (compressed_fields(32), {"weight_shape": torch.tensor([7, 9])}, WeightsError, "weight_shape says [7, 9]"),
    (compressed_fields(32), _without("weight_scale"), WeightsError, f"lacks {LAYER}.weight_scale"),
    (
        compressed_fields(32, symmetric=False),
        _without("weight_zero_point"),
        WeightsError,
        f"lacks {LAYER}.weight_zero_point",
    ),
    (
        compressed_fields(32),
        {"weight_zero_point": torch.zeros(16, 8, dtype=torch.int32)},
        UnsupportedModelError,
        f"{LAYER}.weight_zero_point has the type I32 and belongs to no",
    ),
    (
        compressed_fields(32, actorder="group"),
        {"weight_g_idx": torch.full((256,), 8, dtype=torch.int32)},
        WeightsError,
        "weight_g_idx must hold groups in [0, 8), got 8 to 8",
    ),
]


@pytest.mark.parametrize(("fields", "changed", "error", "named"), DAMAGED)
def test_damaged_tensors_are_refused_by_name(
    tmp_path: Path,
    fields: dict[str, Any],
    changed: dict[str, Tensor | None],
    error: type[Exception],
    named: str,
) -> None:
    written = fields
    if fields == awq_fields(96):
        written = awq_fields(32)
    stored, _ = make(written)
    for part, values in changed.items():
        stored.pop(f"{LAYER}.{part}", None)
        if values is not None:
            stored[f"{LAYER}.{part}"] = values
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": fields})
    with pytest.raises(error, match=re.escape(named)):
        logprobs(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["awq-128", "gptq-32", "gptq-ordered", "gptq-8", "compressed--1"])
def test_a_model_on_a_gpu(tmp_path: Path, name: str) -> None:
    """Packed weights in an engine with graphs, at few and many rows, against floats of the same numbers."""
    stored, meant = make(FIELDS[name])
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": FIELDS[name]})
    prompt = list(range(90)) * 4

    def scores(path: str, **options: Any) -> tuple[Tensor, Hashable]:
        llm = LLM(path, device="cuda", dtype="bfloat16", num_blocks=64, max_num_seqs=8, **options)
        found = [llm.score(each, CONTINUATIONS) for each in (PREFIX, prompt)]
        assert llm.stats.late_work == LateWork(0, 0, 0)
        kernels = llm.engine.runner.decoder.layers[1].feed_forward.kind  # type: ignore[attr-defined]
        return torch.tensor([part.token_logprobs for parts in found for part in parts]), kernels

    exact = logprobs(write(tmp_path / "meant", meant, CONFIG))
    (floats, float_kernels), (packed, packed_kernels) = scores(model, quantization="none"), scores(model)
    assert packed_kernels != float_kernels
    assert (packed[:2] - exact).abs().max() < 2 * (floats[:2] - exact).abs().max() + 0.05
    assert (packed - floats).abs().max() < 0.1
