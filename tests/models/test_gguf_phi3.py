"""Phi-3's family in GGUF files, as llama.cpp's converter writes them: the network of test_phi4_mini."""

from contextlib import closing
from pathlib import Path
from typing import Any

import gguf_builder as build
import numpy as np
import pytest
import torch
from decoder_harness import make_decoder
from gguf import GGMLQuantizationType, quants
from gguf_builder import Tensor
from test_phi4_mini import CONFIG, LONG, SHORT, check, make_model

from octavo.cli import main
from octavo.errors import FileFormatError, UnsupportedModelError, WeightsError
from octavo.gemm.cpu import block_linear as blocks
from octavo.gemm.cpu.block_linear import BlockLinear
from octavo.layers.rope_scaling import inverse_frequencies
from octavo.layers.rotary import interleave_halves
from octavo.models import ModelConfig
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config
from octavo.models.parameters import with_own_projections
from octavo.models.weights import QuantisedSource, WeightSource
from octavo.parallel import TensorParallel

LONG_NAME, SHORT_NAME = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = {
    f"rope_factors_{name}.weight": np.array(CONFIG["rope_scaling"][f"{name}_factor"])
    for name in ("long", "short")
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Rows of query, key and value; rows of gate and up.
PARTS = {"self_attn.q": (0, 96), "self_attn.k": (96, 32), "self_attn.v": (128, 32)}
PARTS |= {"mlp.gate": (0, 80), "mlp.up": (80, 80)}


def metadata(**more: object) -> dict[str, object]:
    own: dict[str, object] = {
        "block_count": 3,
        "context_length": 1024,
        "embedding_length": 96,
        "feed_forward_length": 80,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 2048,
        "rope.dimension_count": 12,
        "rope.freq_base": 10000.0,
        "rope.scaling.original_context_length": 32,
        # sqrt(1 + ln(1024 / 32) / ln(32))
        "rope.scaling.attn_factor": 2**0.5,
    } | {key.replace("__", "."): value for key, value in more.items()}
    wanted = {f"phi3.{key}": value for key, value in own.items() if value is not None}
    return {"general.architecture": "phi3"} | wanted


def stored(name: str, values: torch.Tensor, kind: str | None) -> Tensor:
    """The fused matrices of a kind, all else in floats: ranks could not cut blocks of so small a network."""
    if kind is None or not name.endswith(("attn_qkv.weight", "ffn_up.weight")):
        return Tensor.of(name, values.numpy())
    quantised = GGMLQuantizationType[kind]
    data = quants.quantize(values.numpy(), quantised).tobytes()
    return Tensor(name, tuple(reversed(values.shape)), data, kind=int(quantised))


def tensors(kind: str | None = None) -> list[Tensor]:
    found = [Tensor.of(name, values) for name, values in FACTORS.items()]
    for full, values in make_model().state_dict().items():
        name, _, _ = full.rpartition(".")
        layer, _, stem = name.removeprefix("model.layers.").partition(".")
        is_outer = name in NAMES
        if is_outer or stem in NAMES:
            own = NAMES[name] if is_outer else f"blk.{layer}.{NAMES[stem]}"
            found.append(stored(f"{own}.weight", values, kind))
    return found


def without(names: set[str | bytes], *more: Tensor) -> list[Tensor]:
    return [tensor for tensor in tensors() if tensor.name not in names] + list(more)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.write(tmp_path_factory.mktemp("gguf") / "phi.gguf", metadata(), tensors())


def open_config(path: Path) -> ModelConfig:
    with closing(GGUFFile.open(path)) as file:
        return ModelConfig.from_hf(gguf_to_hf_config(file))


def test_the_config_is_that_of_the_folder(path: Path) -> None:
    config, expected = open_config(path), ModelConfig.from_hf(CONFIG)
    for name in ("rotary_dim", "head_dim", "layer_windows", "tie_word_embeddings", "has_fused_projections"):
        assert getattr(config, name) == getattr(expected, name), name
    for length in (32, 33):
        ours, our_factor = inverse_frequencies(config.ropes[0], 12, length)
        theirs, their_factor = inverse_frequencies(expected.ropes[0], 12, length)
        torch.testing.assert_close(ours, theirs)
        assert our_factor == pytest.approx(their_factor)


@pytest.mark.parametrize(
    ("prompt", "options"), [(SHORT, {"max_model_len": 32}), (LONG, {})], ids=["short", "long"]
)
def test_tokens_are_those_of_transformers(prompt: list[int], options: dict[str, int], path: Path) -> None:
    check(path, make_model(), prompt, **options)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_rows_of_fused_matrices_stay_in_their_blocks(kind: str, tmp_path: Path) -> None:
    """Any rows and blocks of a projection, as ranks ask for them."""
    path = build.write(tmp_path / "phi.gguf", metadata(), tensors(kind))
    config = open_config(path)
    with closing(GGUFWeights(GGUFFile.open(path))) as weights:
        own = with_own_projections(weights, config)
        assert isinstance(own, QuantisedSource)
        assert {each.form for each in own.storage().values()} == {kind}
        for stem, (first, size) in PARTS.items():
            name = f"model.layers.2.{stem}_proj.weight"
            fused = "self_attn.qkv_proj" if "attn" in stem else "mlp.gate_up_proj"
            whole = weights.read(f"model.layers.2.{fused}.weight", dtype=torch.float32)[first : first + size]
            assert own.shape(name) == (size, 96)
            assert torch.equal(own.read(name, dtype=torch.float32), whole)
            assert torch.equal(own.read_quantised(name).dequantise(), whole)
            part = own.read_quantised(name, rows=slice(7, size - 3), columns=slice(32, 96))
            assert torch.equal(part.dequantise(), whole[7 : size - 3, 32:96])


@pytest.mark.skipif(
    blocks.unsupported_reason(torch.device("cpu"), torch.float32) is not None, reason="needs a C compiler"
)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_multiplies_its_rows_in_blocks(rank: int, tmp_path: Path) -> None:
    path = build.write(tmp_path / "phi.gguf", metadata(), tensors("Q4_0"))
    config, parallel = open_config(path), TensorParallel.not_met(rank, 2)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    with closing(GGUFWeights(GGUFFile.open(path))) as weights:
        layer: Any = make_decoder(config, weights, parallel=parallel, quantization="auto").layers[1]
        own = with_own_projections(weights, config)
        for block, stems in (
            (layer.attention.qkv_proj, list(PARTS)[:3]),
            (layer.feed_forward.gate_up_proj, list(PARTS)[3:]),
        ):
            assert isinstance(block.projection, BlockLinear)
            rows = [rows_of_rank(own, stem, rank) for stem in stems]
            expected = x @ torch.cat(rows).T
            # Activations are rounded to 8 bits.
            margin = 0.02 * float(expected.abs().max())
            torch.testing.assert_close(block.projection(x), expected, atol=margin, rtol=0)


def rows_of_rank(weights: WeightSource, stem: str, rank: int) -> torch.Tensor:
    """Half of a projection's rows, in the order of the rotation."""
    size = PARTS[stem][1] // 2
    part = slice(rank * size, (rank + 1) * size)
    rows = weights.read(f"model.layers.1.{stem}_proj.weight", rows=part, dtype=torch.float32)
    return interleave_halves(rows, 16, 12) if stem in ("self_attn.q", "self_attn.k") else rows


@pytest.mark.parametrize(
    ("given", "windows"), [(None, (None,) * 3), (0, (None,) * 3), (64, (64,) * 3)], ids=str
)
def test_a_window_is_for_all_layers_and_0_is_none(
    given: int | None, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    path = build.write(tmp_path / "m.gguf", metadata(attention__sliding_window=given), tensors())
    assert open_config(path).layer_windows == windows


def test_a_model_without_factors(tmp_path: Path) -> None:
    """Phi-3-mini-4k and Phi-4: whole heads turn, as trained, and the LM head is a matrix of its own."""
    head = Tensor.of("output.weight", np.zeros((97, 96)))
    more: dict[str, object] = {"rope__dimension_count": 16, "rope__scaling__attn_factor": None}
    path = build.write(tmp_path / "m.gguf", metadata(**more), without(set(FACTORS), head))
    config = open_config(path)
    assert (config.rotary_dim, config.ropes[0].rope_type) == (16, "default")
    assert not config.tie_word_embeddings


def test_inspect_reads_such_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = build.write(tmp_path / "phi.gguf", metadata(), tensors("Q4_0"))
    main(["inspect", str(path), "--device", "cpu"])
    assert "Q4_0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("rope.scaling.attn_factor", None, FileFormatError, "rope.scaling.attn_factor is missing"),
        ("rope.scaling.attn_factor", -1.0, FileFormatError, "rope.scaling.attn_factor must be"),
        ("rope.scaling.factor", 32.0, UnsupportedModelError, "rope.scaling.factor = 32.0 is not supported"),
        ("rope.scaling.type", "yarn", UnsupportedModelError, "rope.scaling.type = 'yarn' is not supported"),
        ("rope.dimension_count", 18, FileFormatError, "at most the head dimension 16, got 18"),
        ("rope.dimension_count", 16, FileFormatError, r"rope_factors_long.weight, F32 of \[8\], got F32 of"),
        ("attention.sliding_window", "wide", FileFormatError, "attention.sliding_window must be"),
    ],
)
def test_malformed_keys_are_named(
    key: str, value: object, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = build.write(tmp_path / "m.gguf", metadata(**{key: value}), tensors())
    with pytest.raises(error, match=message):
        open_config(path)


@pytest.mark.parametrize(
    ("left_out", "more", "error", "message"),
    [
        ({LONG_NAME}, None, FileFormatError, r"rope_factors_long.weight, F32 of \[6\], got none"),
        ({SHORT_NAME}, None, FileFormatError, r"rope_factors_short.weight, F32 of \[6\], got none"),
        (
            {SHORT_NAME},
            Tensor.of(SHORT_NAME, np.ones(5)),
            FileFormatError,
            r"rope_factors_short.weight, F32 of \[6\], got F32 of \[5\]",
        ),
        (
            {LONG_NAME},
            Tensor(LONG_NAME, (6,), np.ones(6, "f2").tobytes(), kind=1),
            FileFormatError,
            "got F16 of",
        ),
        ({LONG_NAME}, Tensor.of(LONG_NAME, np.zeros(6)), FileFormatError, "long_factor: 0 must be"),
        (set(FACTORS), None, UnsupportedModelError, r"rope.scaling.attn_factor = 1.4\d+ is not supported"),
        (
            {"blk.1.attn_qkv.weight"},
            Tensor.of("blk.1.attn_qkv.weight", np.zeros((159, 96))),
            WeightsError,
            r"layers.1.self_attn.qkv_proj.weight is \[159, 96\], expected 160 rows",
        ),
        (
            {"blk.0.ffn_up.weight"},
            Tensor.of("blk.0.ffn_up.weight", np.zeros((80, 96))),
            WeightsError,
            r"layers.0.mlp.gate_up_proj.weight is \[80, 96\], expected 160 rows",
        ),
        ({"blk.0.ffn_up.weight"}, None, WeightsError, "layers.0.mlp.gate_proj.weight"),
        (
            set(),
            Tensor.of("blk.2.attn_k.weight", np.zeros((32, 96))),
            WeightsError,
            r"the checkpoint has model.layers.2.self_attn.k_proj.weight twice",
        ),
        (
            set(),
            Tensor.of("rope_freqs.weight", np.ones(6)),
            UnsupportedModelError,
            "rope_freqs.weight' has no place in a phi3 model",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    left_out: set[str | bytes], more: Tensor | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    found = without(left_out, *([] if more is None else [more]))
    path = build.write(tmp_path / "m.gguf", metadata(), found)
    with pytest.raises(error, match=message), closing(GGUFFile.open(path)) as file:
        make_decoder(ModelConfig.from_hf(gguf_to_hf_config(file)), GGUFWeights(file))


def test_the_type_longrope_needs_its_factors(tmp_path: Path) -> None:
    more: dict[str, object] = {"rope__scaling__type": "longrope", "rope__scaling__attn_factor": None}
    path = build.write(tmp_path / "m.gguf", metadata(**more), without(set(FACTORS)))
    with pytest.raises(UnsupportedModelError, match=r"'longrope' is not supported without rope_factors_long"):
        open_config(path)
