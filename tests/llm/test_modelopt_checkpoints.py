"""Models of ModelOpt checkpoints, and of other small floats, against the network that their numbers mean."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_checkpoints import CONFIG, write
from modelopt_checkpoints import LAYOUTS, fp8, fp8_rows, int4, int8, make, modelopt, nvfp4
from torch import Tensor

from octavo import LLM
from octavo.engine.step.result import LateWork
from octavo.errors import UnsupportedModelError, WeightsError
from octavo.forms.blocks import BlockWeight
from octavo.forms.float_experts import ExpertWeight
from octavo.models import builder, open_weights, resolve_model, stored_matrices
from octavo.models.weights import QuantisedSource

PREFIX, CONTINUATIONS = [1, 5, 7, 9], [[3, 8, 60, 2, 44], [90, 0, 12, 31, 5]]
LAYER = "model.layers.1.mlp.down_proj"
EXPERTS = CONFIG | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "mlp_only_layers": [],
}


def logprobs(model: str, **options: Any) -> Tensor:
    llm = LLM(model, device="cpu", num_blocks=64, block_size=4, **options)
    return torch.tensor([each.token_logprobs for each in llm.score(PREFIX, CONTINUATIONS)])


def check(
    folder: Path,
    stored: dict[str, Tensor],
    meant: dict[str, Tensor],
    fields: dict[str, Any],
    config: dict[str, Any] = CONFIG,
) -> float:
    """Compare a checkpoint, dequantised, with what it means; return how far it is as it is stored."""
    model = write(folder / "stored", stored, config | {"quantization_config": fields})
    expected = logprobs(write(folder / "meant", meant, config))
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)
    return (logprobs(model) - expected).abs().max().item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_a_model_is_what_its_numbers_mean(tmp_path: Path, layout: str, config: dict[str, Any]) -> None:
    fields, pack = LAYOUTS[layout]
    stored, meant = make(lambda name: pack, config)
    # Products with packed weights round activations to 8 bits, and a token may get another expert for it.
    limit = 0.2 if config is CONFIG else 1
    assert check(tmp_path, stored, meant, fields, config) < (1e-4 if "fp8" in layout else limit)


def test_matrices_may_be_quantised_in_several_ways(tmp_path: Path) -> None:
    """As in quantized_layers: each layer's algorithm is seen from its tensors."""
    ways = {
        **{"q_proj": ("FP8", fp8), "o_proj": ("FP8_PER_CHANNEL_PER_TOKEN", fp8_rows)},
        **{"up_proj": ("W4A16_AWQ", int4), "gate_proj": ("NVFP4", nvfp4), "down_proj": ("W8A16", int8)},
    }

    def packer(name: str) -> Any:
        return ways.get(name.split(".")[-2], (None, None))[1]

    stored, meant = make(packer)
    layers = {f"model.layers.0.self_attn.{name}": {"quant_algo": way[0]} for name, way in ways.items()}
    fields = modelopt("MIXED_PRECISION", quantized_layers=layers)
    assert check(tmp_path, stored, meant, fields) < 0.2


def with_scales(
    stored: dict[str, Tensor],
    meant: dict[str, Tensor],
    *projections: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Give projections scales of their inputs."""
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in meant if name.endswith(tuple(f"{each}.weight" for each in projections))]:
        scales = (0.5 + torch.rand(meant[name].shape[1], generator=generator)).to(dtype)
        stored[f"{name.removesuffix('weight')}pre_quant_scale"] = scales
        meant[name] = (meant[name].double() * scales.double()).float()


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", ["int4", "int8", "nvfp4", "fp8"])
def test_scales_of_inputs_are_a_part_of_the_weights(
    tmp_path: Path, layout: str, config: dict[str, Any]
) -> None:
    fields, pack = LAYOUTS[layout]
    stored, meant = make(lambda name: pack, config)
    with_scales(stored, meant, "o_proj", "down_proj", "up_proj")
    assert check(tmp_path, stored, meant, fields, config) < (0.2 if config is CONFIG else 1)


def test_scales_of_down_go_into_the_rows_of_up(tmp_path: Path) -> None:
    """So that both stay packed; where up cannot take them, down is dequantised."""
    fields, pack = LAYOUTS["int4"]
    stored, meant = make(lambda name: None if name.endswith("0.mlp.up_proj.weight") else pack)
    with_scales(stored, meant, "down_proj", "o_proj")
    model = write(tmp_path, stored, CONFIG | {"quantization_config": fields})
    matrices = stored_matrices(resolve_model(model))
    assert matrices["model.layers.0.mlp.down_proj.weight"].kind == "odd blocks"
    assert matrices["model.layers.1.mlp.down_proj.weight"].kind == "blocks"
    assert matrices["model.layers.1.mlp.up_proj.weight"].kind == "blocks"
    assert matrices["model.layers.1.self_attn.o_proj.weight"].kind == "odd blocks"
    assert check(tmp_path, stored, meant, fields) < 0.2


def open_scaled(folder: Path, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor], QuantisedSource]:
    """Write a checkpoint with scales of down's inputs: what it stores, what it means, and its source."""
    fields, pack = LAYOUTS[layout]
    stored, meant = make(lambda name: pack)
    with_scales(stored, meant, "down_proj")
    weights = open_weights(resolve_model(write(folder, stored, CONFIG | {"quantization_config": fields})))
    assert isinstance(weights, QuantisedSource)
    return stored, meant, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_those_of_the_whole(tmp_path: Path, layout: str) -> None:
    """What a rank reads: rows anywhere, columns between groups."""
    stored, meant, weights = open_scaled(tmp_path, layout)
    up = "model.layers.1.mlp.up_proj.weight"
    if weights.storage()[up].kind == "blocks":
        scales = stored[f"{LAYER}.pre_quant_scale"].float()
        meant[up] = meant[up] * scales[:, None]
        meant[f"{LAYER}.weight"] = meant[f"{LAYER}.weight"] / scales
    for name, rows, columns in (
        (f"{LAYER}.weight", slice(5, 78), slice(128, 256)),
        (f"{LAYER}.weight", slice(63, 64), None),
        (up, slice(7, 250), None),
    ):
        got = weights.read_quantised(name, rows=rows, columns=columns).dequantise()
        exact = meant[name][rows, columns or slice(None)]
        torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["int4", "int8", "nvfp4", "nvfp4-wide"])
def test_the_plan_knows_the_bytes(tmp_path: Path, layout: str) -> None:
    _, _, weights = open_scaled(tmp_path, layout)
    for name, storage in weights.storage().items():
        weight = weights.read_quantised(name)
        assert isinstance(weight, BlockWeight)
        blocks = weight.in_blocks()
        num_bytes = blocks.quants.numel() * blocks.bits / 8 + blocks.scales.nbytes
        num_bytes += 0 if blocks.mins is None else blocks.mins.nbytes
        assert storage.nbytes(weight.shape) == num_bytes


@pytest.mark.parametrize("beside", [False, True], ids=["config", "hf_quant_config"])
def test_a_cache_alone_may_have_scales(tmp_path: Path, beside: bool) -> None:
    stored, _ = make(lambda name: None)
    for layer in range(2):
        for name in ("k", "v"):
            stored[f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale"] = torch.tensor(0.5 + layer)
    cache = {"num_bits": 8, "type": "float", "dynamic": False}
    fields = {"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": cache}
    model = write(tmp_path, stored, CONFIG | ({} if beside else {"quantization_config": fields}))
    if beside:
        fields = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "quantized_layers": {}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": fields}))
    decoder = LLM(model, device="cpu", num_blocks=32).engine.runner.decoder  # type: ignore[attr-defined]
    assert decoder.kv_scales[:, :, 0].tolist() == [[0.5, 0.5], [1.5, 1.5]]


U8 = torch.uint8
# Layout, what differs in the file under the layer's name, the error, and what it names.
DAMAGED: list[tuple[str, dict[str, Tensor | None], type[Exception], str]] = [
    ("int4", {"weight_scale": None}, WeightsError, f"lacks {LAYER}.weight_scale, which belongs to"),
    ("int4", {"weight_scale": torch.ones(128, 3)}, WeightsError, "weight_scale is [128, 3], expected"),
    ("int4", {"weight_scale": torch.ones(64, 4)}, WeightsError, "[64, 4], expected [128, 4]"),
    ("int4", {"weight_scale": torch.full((128, 4), torch.inf)}, WeightsError, "must hold finite numbers"),
    ("int4", {"weight": torch.zeros(64, dtype=U8)}, WeightsError, "expected 2 dimensions"),
    ("int4", {"pre_quant_scale": torch.ones(255)}, WeightsError, "pre_quant_scale is [255], expected [256]"),
    ("int4", {"pre_quant_scale": torch.full((256,), torch.nan)}, WeightsError, "must hold finite numbers"),
    ("int4", {"pre_quant_scale": torch.ones(256).int()}, UnsupportedModelError, "has the type I32"),
    ("int4", {"weight_zero_point": torch.ones(128, 4)}, WeightsError, "weight_zero_point, which config"),
    ("w4a8", {"weight_scale_2": torch.ones(2)}, WeightsError, "weight_scale_2 is [2], expected [1]"),
    # As mtq.compress packs them, two columns in a byte.
    ("int4", {"weight": torch.zeros(128, 128, dtype=U8)}, WeightsError, "[128, 4], expected [256, 4]"),
    ("nvfp4", {"weight_scale": None}, WeightsError, f"lacks {LAYER}.weight_scale"),
    ("nvfp4", {"weight_scale_2": None}, WeightsError, f"lacks {LAYER}.weight_scale_2"),
    ("nvfp4", {"weight_scale": torch.ones(128, 16)}, UnsupportedModelError, "has the type F32; expected F8"),
    (
        "nvfp4",
        {"weight_scale": torch.ones(128, 4).to(torch.float8_e4m3fn)},
        WeightsError,
        "weight_scale is [128, 4], expected [128, 16] or [128, 8]",
    ),
    ("nvfp4", {"weight_scale_2": torch.tensor(torch.inf)}, WeightsError, "must make finite numbers"),
    (
        "nvfp4",
        {"weight_quantizer._svdquant_lora_a": torch.ones(8, 256)},
        WeightsError,
        "lora_a, which config",
    ),
    ("nvfp4-compressed", {"weight_global_scale": None}, WeightsError, f"lacks {LAYER}.weight_global_scale"),
    ("nvfp4-compressed", {"weight_global_scale": torch.zeros(1)}, WeightsError, "must make finite numbers"),
    ("mxfp4", {"weight_scale": None}, WeightsError, f"lacks {LAYER}.weight_scale"),
    ("mxfp4", {"weight_scale": torch.ones(128, 8)}, UnsupportedModelError, "has the type F32; expected U8"),
    ("mxfp4", {"weight_scale": torch.full((128, 8), 255, dtype=U8)}, WeightsError, "exponents of 255"),
    ("mxfp4", {"weight_scale": torch.ones(128, 7, dtype=U8)}, WeightsError, "[128, 7], expected [128, 8]"),
    ("mxfp8", {"weight_scale": torch.full((128, 8), 255, dtype=U8)}, WeightsError, "must hold finite"),
    ("mxfp8", {"weight_scale": torch.ones(128, 8)}, UnsupportedModelError, "has the type F32; expected U8"),
    ("fp8-tiles", {"weight_scale": torch.ones(1, 1, 3, 1)}, WeightsError, "[1, 1, 3, 1], expected [1, 2]"),
    ("int8", {"weight_scale": torch.ones(127)}, WeightsError, "weight_scale is [127], expected [128, 1]"),
    ("fp8", {"k_bias": torch.ones(1, 2, 1, 32)}, WeightsError, "k_bias, which config.json has no use for"),
]


@pytest.mark.parametrize(("layout", "changed", "error", "named"), DAMAGED)
def test_damaged_tensors_are_refused_by_name(
    tmp_path: Path, layout: str, changed: dict[str, Tensor | None], error: type[Exception], named: str
) -> None:
    fields, pack = LAYOUTS[layout]
    stored, _ = make(lambda name: pack)
    for part, values in changed.items():
        stored.pop(f"{LAYER}.{part}", None)
        if values is not None:
            stored[f"{LAYER}.{part}"] = values
    model = write(tmp_path, stored, CONFIG | {"quantization_config": fields})
    with pytest.raises(error, match=re.escape(named)):
        logprobs(model)


@pytest.mark.parametrize("layout", ["int4", "int8", "nvfp4", "nvfp4-wide", "mxfp4", "fp8-rows"])
def test_stacks_for_a_gpu_are_the_files_numbers(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, pack = LAYOUTS[layout]
    stored, meant = make(lambda name: pack, EXPERTS)
    model = write(tmp_path, stored, EXPERTS | {"quantization_config": fields})
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    llm = LLM(model, device="cpu", num_blocks=8, block_size=4)
    experts = llm.engine.runner.decoder.layers[1].feed_forward.experts  # type: ignore[attr-defined]
    gate, up, down = (
        meant[f"model.layers.1.mlp.experts.2.{part}_proj.weight"] for part in ("gate", "up", "down")
    )
    for weight, exact in ((experts.gate_up, torch.cat((gate, up))), (experts.down, down)):
        assert not isinstance(weight, ExpertWeight) or weight.values.dtype == torch.float8_e4m3fn
        # Scales have 11 bits.
        torch.testing.assert_close(weight.dequantise()[2], exact, rtol=6e-4, atol=0)


def test_experts_that_no_gpu_multiplies_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, pack = LAYOUTS["mxfp8"]
    stored, _ = make(lambda name: pack, EXPERTS)
    model = write(tmp_path, stored, EXPERTS | {"quantization_config": fields})
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    with pytest.raises(UnsupportedModelError, match=r"experts\.0.*columns.*quantization=\"none\""):
        LLM(model, device="cpu", num_blocks=8, block_size=4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", ["int4", "nvfp4", "nvfp4-wide", "mxfp4", "int8"])
def test_a_model_on_a_gpu(tmp_path: Path, layout: str) -> None:
    """As stored, in an engine with graphs, at few and many rows, against floats of the same numbers."""
    fields, pack = LAYOUTS[layout]
    stored, meant = make(lambda name: pack)
    with_scales(stored, meant, *(["down_proj"] if layout == "int4" else []))
    model = write(tmp_path / "stored", stored, CONFIG | {"quantization_config": fields})
    prompt = list(range(90)) * 4

    def scores(path: str, **options: Any) -> Tensor:
        llm = LLM(path, device="cuda", dtype="bfloat16", num_blocks=64, max_num_seqs=8, **options)
        found = [llm.score(each, CONTINUATIONS) for each in (PREFIX, prompt)]
        assert llm.stats.late_work == LateWork(0, 0, 0)
        return torch.tensor([part.token_logprobs for parts in found for part in parts])

    exact = logprobs(write(tmp_path / "meant", meant, CONFIG))
    floats, kept = scores(model, quantization="none"), scores(model)
    assert (kept[:2] - exact).abs().max() < 2 * (floats[:2] - exact).abs().max() + 0.05
    assert (kept - floats).abs().max() < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", ["int4", "nvfp4", "mxfp4"])
def test_experts_on_a_gpu(tmp_path: Path, layout: str) -> None:
    fields, pack = LAYOUTS[layout]
    stored, _ = make(lambda name: pack, EXPERTS)
    model = write(tmp_path, stored, EXPERTS | {"quantization_config": fields})

    def scores(**options: Any) -> Tensor:
        llm = LLM(model, device="cuda", dtype="bfloat16", num_blocks=64, max_num_seqs=8, **options)
        return torch.tensor([part.token_logprobs for part in llm.score(PREFIX, CONTINUATIONS)])

    assert (scores() - scores(quantization="none")).abs().median() < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mxfp8_on_a_gpu(tmp_path: Path) -> None:
    """Activations become float8, too."""
    fields, pack = LAYOUTS["mxfp8"]
    stored, _ = make(lambda name: pack)
    model = write(tmp_path, stored, CONFIG | {"quantization_config": fields})
    options = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 64}
    kept, floats = (LLM(model, **options, **more) for more in ({}, {"quantization": "none"}))
    scores = [
        torch.tensor([part.token_logprobs for part in llm.score(PREFIX, CONTINUATIONS)])
        for llm in (kept, floats)
    ]
    assert (scores[0] - scores[1]).abs().median() < 0.2
