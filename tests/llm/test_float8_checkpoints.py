"""Checkpoints of float8 matrices in the layouts of those who write them, against the dequantised network.

The oracle is the same network in float32, whose matrices are dequantised here, in float64.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_model import TINY_LLAMA
from torch import Tensor

from octavo import LLM
from octavo.errors import ConfigError, ModelError, UnsupportedModelError, WeightsError
from octavo.models import ModelConfig, open_weights, parameter_shapes, resolve_model
from octavo.models.weights import QuantisedSource

FLOAT8 = torch.float8_e4m3fn
CONFIG = TINY_LLAMA | {"attention_bias": True}
PROMPT, CONTINUATIONS = [1, 5, 7, 9], [[3, 8, 60, 2, 44], [99, 0, 12, 31, 5]]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def compressed(strategy: str, block: list[int] | None = None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": block}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return fields | {"config_groups": {"group_0": group}}


# Field of config.json, tile of a scale (0: all), shape of scales that is not [tiles, tiles], name, dtype.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, int], list[int] | None, str, torch.dtype]] = {
    "blocks": (BLOCKS, (16, 32), None, "weight_scale_inv", torch.bfloat16),
    # Tiles that no matrix is a multiple of, and that cut heads.
    "odd-blocks": (
        BLOCKS | {"weight_block_size": [12, 20]},
        (12, 20),
        None,
        "weight_scale_inv",
        torch.float32,
    ),
    "tensor": (TENSOR, (0, 0), [], "weight_scale", torch.float32),
    "modelopt": (MODELOPT, (0, 0), [], "weight_scale", torch.float32),
    "compressed-channel": (compressed("channel"), (1, 0), [-1, 1], "weight_scale", torch.bfloat16),
    "compressed-tensor": (compressed("tensor"), (0, 0), [1], "weight_scale", torch.float32),
    "compressed-block": (compressed("block", [32, 16]), (32, 16), None, "weight_scale", torch.float32),
}


def write(
    folder: Path, layout: str, plain: tuple[str, ...] = (), tied: bool = False, **changed: Tensor | None
) -> dict[str, Tensor]:
    """Write a random checkpoint, and return the network's tensors as it means them, float32.

    plain: matrices that stay bfloat16. changed: tensors that differ in the file, by name; None: are missing.
    """
    config = CONFIG | {"tie_word_embeddings": tied, "quantization_config": LAYOUTS[layout][0]}
    stored, meant = make(layout, config, plain)
    stored |= {name: tensor for name, tensor in changed.items() if tensor is not None}
    save(folder, config, {name: each for name, each in stored.items() if changed.get(name, each) is not None})
    return meant


def make(
    layout: str, config: dict[str, Any], plain: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a random checkpoint, and those of the network that they mean, float32."""
    fields, tile, scale_shape, scale_name, scale_dtype = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(7)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(ModelConfig.from_hf(config)).items():
        numbers = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 1)
        if not name.endswith("_proj.weight") or name.endswith(plain):
            stored[name] = numbers.bfloat16()
            meant[name] = stored[name].float()
            continue
        height, width = (size or whole for size, whole in zip(tile, shape, strict=True))
        scales = torch.rand(-(-shape[0] // height), -(-shape[1] // width), generator=generator) * 3 + 1
        scales = (scales / 200).to(scale_dtype)
        stored[name] = (numbers * 200).to(FLOAT8)
        spread = scales.double().repeat_interleave(height, 0).repeat_interleave(width, 1)
        meant[name] = (stored[name].double() * spread[: shape[0], : shape[1]]).float()
        prefix = name.removesuffix("weight")
        stored[prefix + scale_name] = scales if scale_shape is None else scales.reshape(scale_shape)
        if fields.get("activation_scheme") == "static" or layout == "modelopt":
            stored[f"{prefix}input_scale"] = torch.tensor(0.5)
    return stored, meant


def save(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", num_blocks=32, block_size=4, **options)


def scores(llm: LLM) -> Tensor:
    return torch.tensor([output.token_logprobs for output in llm.score(PROMPT, CONTINUATIONS)])


def oracle(folder: Path, meant: dict[str, Tensor], tied: bool = False) -> Tensor:
    save(folder, CONFIG | {"tie_word_embeddings": tied}, meant)
    return scores(load(folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_means_what_it_says(layout: str, tmp_path: Path) -> None:
    expected = oracle(tmp_path / "exact", write(tmp_path / "m", layout))
    kept, dequantised = (load(tmp_path / "m", quantization=q) for q in ("auto", "none"))
    torch.testing.assert_close(scores(kept), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores(dequantised), expected, rtol=1e-4, atol=1e-4)
    assert kept.engine.plan.weight_bytes < 0.6 * dequantised.engine.plan.weight_bytes


def test_matrices_may_stay_unquantised_and_embeddings_be_tied(tmp_path: Path) -> None:
    """One of fused projections is enough to make numbers of all."""
    plain = ("0.mlp.down_proj.weight", "1.self_attn.k_proj.weight")
    meant = write(tmp_path / "m", "blocks", plain, tied=True)
    llm = load(tmp_path / "m")
    torch.testing.assert_close(scores(llm), oracle(tmp_path / "exact", meant, True), rtol=1e-4, atol=1e-4)
    # A GPU compiles the kernels of one layer of each kind.
    first, second = llm.engine.runner.decoder.layers  # type: ignore[attr-defined]
    assert first.kind != second.kind


def test_modelopts_file_and_its_scales_of_the_cache(tmp_path: Path) -> None:
    changed = {
        f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": torch.tensor(0.5 + layer)
        for layer in (0, 1)
        for name in ("k", "v")
    }
    write(tmp_path, "modelopt", **changed)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["quant_method"]
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": config["quantization_config"]})
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    decoder = load(tmp_path).engine.runner.decoder  # type: ignore[attr-defined]
    assert decoder.kv_scales[:, :, 0].tolist() == [[0.5, 0.5], [1.5, 1.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_of_floats_is_rounded_row_by_row(dtype: torch.dtype, tmp_path: Path) -> None:
    floats = write(tmp_path / "m", "tensor", plain=("_proj.weight",))
    meant = {name: (tensor * 1.01).to(dtype) for name, tensor in floats.items()}
    save(tmp_path / "m", CONFIG, meant)
    exact = {name: tensor.float() for name, tensor in meant.items()}
    for name, tensor in exact.items():
        if name.endswith("_proj.weight"):
            scales = tensor.double().abs().amax(1, True) / 448
            exact[name] = ((tensor.double() / scales).to(FLOAT8).double() * scales).float()
    llm = load(tmp_path / "m", quantization="fp8")
    # A number in the middle of two of float8 may become either.
    torch.testing.assert_close(scores(llm), oracle(tmp_path / "exact", exact), rtol=0, atol=0.02)
    plain = load(tmp_path / "exact")
    assert (scores(plain) - scores(load(tmp_path / "m"))).abs().max() > 0.1
    assert llm.engine.plan.weight_bytes < 0.6 * plain.engine.plan.weight_bytes


DOWN = "model.layers.1.mlp.down_proj"
BAD: list[tuple[str, dict[str, Tensor | None], type[ModelError], str]] = [
    ("blocks", {f"{DOWN}.weight_scale_inv": None}, WeightsError, rf"lacks {DOWN}\.weight_scale_inv"),
    ("tensor", {f"{DOWN}.weight_scale": None}, WeightsError, rf"lacks {DOWN}\.weight_scale,"),
    ("tensor", {f"{DOWN}.input_scale": None}, WeightsError, rf"lacks {DOWN}\.input_scale"),
    ("tensor", {f"{DOWN}.input_scale": torch.ones(3)}, WeightsError, r"input_scale is \[3\], expected \[1\]"),
    ("blocks", {f"{DOWN}.weight_scale_inv": torch.ones(2, 1)}, WeightsError, r"\[2, 1\], expected \[2, 2\]"),
    ("tensor", {f"{DOWN}.weight_scale": torch.ones(31, 1)}, WeightsError, r"\[31, 1\], expected \[32, 1\]"),
    ("tensor", {f"{DOWN}.weight_scale": torch.tensor(float("nan"))}, WeightsError, "finite numbers"),
    ("blocks", {f"{DOWN}.weight_scale_inv": -torch.ones(2, 2)}, WeightsError, "at least 0"),
    (
        "tensor",
        {f"{DOWN}.weight_scale": torch.ones(1, dtype=torch.int32)},
        UnsupportedModelError,
        "weight_scale has the type I32",
    ),
    (
        "blocks",
        {f"{DOWN}.weight": torch.zeros(32, 48).to(torch.float8_e5m2)},
        UnsupportedModelError,
        "down_proj.weight has the type F8_E5M2",
    ),
    ("tensor", {f"{DOWN}.weight": torch.zeros(32, 48, 1).to(FLOAT8)}, WeightsError, "expected 2 dimensions"),
    ("tensor", {f"{DOWN}.weight": torch.zeros(32, 40).to(FLOAT8)}, WeightsError, r"\[32, 40\], expected"),
    ("tensor", {f"{DOWN}.weight_zero_point": torch.ones(1)}, WeightsError, "weight_zero_point, which config"),
    ("tensor", {"model.norm.weight": torch.ones(32).to(FLOAT8)}, WeightsError, r"norm\.weight is \[32\]"),
]


@pytest.mark.parametrize(("layout", "changed", "error", "named"), BAD)
def test_what_does_not_fit_is_refused_by_name(
    layout: str, changed: dict[str, Tensor | None], error: type[ModelError], named: str, tmp_path: Path
) -> None:
    write(tmp_path, layout, **changed)
    with pytest.raises(error, match=named):
        load(tmp_path)


def test_float8_without_a_quantization_config_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "blocks")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UnsupportedModelError, match="F8_E4M3"):
        load(tmp_path)


def test_parts_are_those_of_the_dequantised_matrix(tmp_path: Path) -> None:
    """Rows can be cut anywhere, columns between scales."""
    meant = write(tmp_path, "blocks")
    source = open_weights(resolve_model(str(tmp_path)))
    assert isinstance(source, QuantisedSource)
    name = f"{DOWN}.weight"
    for rows in (slice(0, 32), slice(16, 32), slice(5, 19), slice(20, 20)):
        for columns in (slice(0, 48), slice(0, 32), slice(32, 48)):
            got = source.read_quantised(name, rows=rows, columns=columns).dequantise()
            torch.testing.assert_close(got, meant[name][rows, columns])
    with pytest.raises(ConfigError, match=r"scales for 32 columns each, not into columns 0 to 24 of 48"):
        source.read_quantised(name, columns=slice(0, 24))


@pytest.mark.parametrize("layout", ["tensor", "compressed-channel"])
def test_columns_can_be_cut_where_they_share_a_scale(layout: str, tmp_path: Path) -> None:
    meant = write(tmp_path, layout)
    source = open_weights(resolve_model(str(tmp_path)))
    assert isinstance(source, QuantisedSource)
    for rows, columns in ((None, slice(0, 24)), (slice(5, 19), slice(24, 48)), (slice(8, 9), slice(7, 30))):
        got = source.read_quantised(f"{DOWN}.weight", rows=rows, columns=columns).dequantise()
        torch.testing.assert_close(got, meant[f"{DOWN}.weight"][rows or slice(None), columns])


def test_a_quantised_checkpoint_in_blocks_is_not_rounded_again() -> None:
    with pytest.raises(ConfigError, match="rounds numbers, but the checkpoint stores"):
        LLM("smollm2", quantization="fp8")
