"""gpt-oss in GGUF files, as llama.cpp's converter writes them: beside the folder that is published."""

from contextlib import closing
from pathlib import Path
from typing import Any

import gguf_builder as build
import numpy as np
import pytest
import torch
from decoder_harness import PagedSequences, make_decoder, run_chunked
from gguf_builder import Tensor
from gpt_oss_checkpoints import TINY, make_tensors, write_folder

from octavo import LLM, SamplingParams
from octavo.cli import main
from octavo.errors import UnsupportedModelError, WeightsError
from octavo.forms.mxfp4 import MXFP4, Mxfp4Weight
from octavo.forms.stored_blocks import StoredBlocks
from octavo.gemm.cpu import block_linear as blocks
from octavo.gemm.cpu.block_linear import BlockLinear, TiledBlocks
from octavo.layers.experts import ListedExperts
from octavo.models import ModelConfig, parameter_shapes
from octavo.models.formats.gguf.dequantize import decode_blocks
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_blocks import quantised_of, read_as_stored
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config
from octavo.models.source import open_weights, resolve_model

TENSORS = make_tensors(TINY)
CONFIG = ModelConfig.from_hf(TINY)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
MXFP4_KIND = 39
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
} | {f"self_attn.{name}_proj.{kind}": f"attn_{name}.{kind}" for name in "qkv" for kind in ("weight", "bias")}
needs_compiler = pytest.mark.skipif(
    blocks.unsupported_reason(torch.device("cpu"), torch.float32) is not None, reason="needs a C compiler"
)


def stack_of(name: str, values: torch.Tensor, exponents: torch.Tensor) -> Tensor:
    """A stack [E, N, K / 32] of blocks: an exponent, then number i beside number i + 16."""
    numbers = torch.stack((values & 15, values >> 4), -1).flatten(-2)
    data = torch.cat((exponents[..., None], numbers[..., :16] | numbers[..., 16:] << 4), -1)
    number, rows, num_blocks, _ = data.shape
    return Tensor(name, (32 * num_blocks, rows, number), data.numpy().tobytes(), kind=MXFP4_KIND)


def gguf_tensors(tensors: dict[str, torch.Tensor] = TENSORS) -> list[Tensor]:
    found = []
    for name, value in tensors.items():
        _, _, rest = name.partition("model.layers.")
        layer, _, stem = rest.partition(".")
        prefix = f"blk.{layer}." if rest else ""
        if (stem or name) in NAMES:
            found.append(Tensor.of(prefix + NAMES[stem or name], value.numpy()))
            continue
        # Rows of gate and up take turns in the folder.
        is_gate_up = "gate_up_proj" in stem
        for first, own in enumerate(("gate", "up") if is_gate_up else ("down",)):
            part = value[:, first::2] if is_gate_up else value
            full = f"{prefix}ffn_{own}_exps"
            if stem.endswith("_bias"):
                found.append(Tensor.of(f"{full}.bias", part.numpy()))
            elif stem.endswith("_blocks"):
                scales = tensors[name.replace("_blocks", "_scales")]
                scales = scales[:, first::2] if is_gate_up else scales
                found.append(stack_of(f"{full}.weight", part, scales))
    return found


def metadata(**more: object) -> dict[str, object]:
    own: dict[str, object] = {
        "block_count": 4,
        "context_length": 131072,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "expert_feed_forward_length": 96,
        "expert_count": 6,
        "expert_used_count": 4,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 8,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    } | more
    return {"general.architecture": "gpt-oss"} | {f"gpt-oss.{key}": value for key, value in own.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.write(tmp_path_factory.mktemp("gguf") / "oss.gguf", metadata(), gguf_tensors())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpt-oss")
    write_folder(made, TINY, TENSORS)
    return made


def logits_of(decoder: Any) -> torch.Tensor:
    return run_chunked(PagedSequences(decoder, block_size=4), {"a": TOKENS})["a"]


def test_the_config_is_that_of_the_folder(path: Path) -> None:
    """Also what a file does not tell: windows of every other layer, no truncated YaRN."""
    file = GGUFFile.open(path)
    config = ModelConfig.from_hf(gguf_to_hf_config(file))
    for name in ("layer_windows", "ropes", "layer_ropes", "experts", "has_sinks", "activation", "head_dim"):
        assert getattr(config, name) == getattr(CONFIG, name), name
    weights = GGUFWeights(file)
    assert {name: weights.shape(name) for name in weights.names()} == parameter_shapes(config)
    assert {each for name, each in weights.storage().items() if ".experts." in name} == {MXFP4}
    weights.close()


@pytest.mark.parametrize("quantization", ["none", pytest.param("auto", marks=needs_compiler)])
def test_logits_are_those_of_the_folder(quantization: str, path: Path, folder: Path) -> None:
    """Dequantised, and with experts in MXFP4: the same numbers."""
    file = GGUFFile.open(path)
    config = ModelConfig.from_hf(gguf_to_hf_config(file))
    with closing(GGUFWeights(file)) as weights, closing(open_weights(resolve_model(str(folder)))) as others:
        ours, theirs = (make_decoder(CONFIG, each, quantization=quantization) for each in (weights, others))
        assert torch.equal(logits_of(ours), logits_of(theirs))
        decoder = make_decoder(config, weights, quantization=quantization)
        torch.testing.assert_close(logits_of(decoder), logits_of(theirs), atol=1e-5, rtol=1e-5)


@needs_compiler
def test_experts_stay_in_4_bits_and_rows_are_rounded_a_little(path: Path) -> None:
    file = GGUFFile.open(path)
    with closing(GGUFWeights(file)) as weights:
        decoders = [make_decoder(CONFIG, weights, quantization=each) for each in ("auto", "none")]
    packed, exact = (decoder.layers[1].feed_forward.experts for decoder in decoders)
    assert isinstance(packed, ListedExperts)
    for linear in (*packed.gate_up, *packed.down):
        assert isinstance(linear, BlockLinear)
        assert all(part.bits == 4 for part in linear.weights)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    choice = decoders[1].layers[1].feed_forward.router(x)
    expected = exact(x, choice)
    torch.testing.assert_close(packed(x, choice), expected, atol=0.02 * float(expected.abs().max()), rtol=0)


def test_a_part_of_an_expert(path: Path) -> None:
    with closing(GGUFWeights(GGUFFile.open(path))) as weights:
        name = "model.layers.1.mlp.experts.4.down_proj.weight"
        part = weights.read_quantised(name, rows=slice(3, 9), columns=slice(32, 96))
        assert part.kind == MXFP4.kind
        whole = weights.read(name, dtype=torch.float32)
        assert torch.equal(part.dequantise(), whole[3:9, 32:96])
        bias = weights.read("model.layers.1.mlp.experts.4.gate_proj.bias", dtype=torch.float32)
        assert torch.equal(bias, TENSORS["model.layers.1.mlp.experts.gate_up_proj_bias"][4, ::2])


def test_an_engine_and_inspect_read_such_a_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    llm = LLM(str(path), device="cpu", num_blocks=32, max_model_len=64)
    (output,) = llm.generate([TOKENS], params)
    assert len(output.outputs[0].token_ids) == 6
    main(["inspect", str(path), "--device", "cpu"])
    assert "MXFP4" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gives_the_folders_tokens(tmp_path: Path) -> None:
    """With experts in MXFP4 from either, alone and in a batch: the same numbers in the same kernels."""
    fields = TINY | {"head_dim": 64, "sliding_window": 24}
    tensors = make_tensors(fields)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(folder, fields, tensors)
    lengths = {"attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 24}
    file = build.write(tmp_path / "m.gguf", metadata(**lengths), gguf_tensors(tensors))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=1)
    prompts = [[(7 * i) % 97 for i in range(length)] for length in (1, 5, 77, 300)]
    found = []
    for path in (folder, file):
        llm = LLM(str(path), dtype="bfloat16", num_blocks=64, block_size=64, max_model_len=512)
        with closing(llm.engine):
            assert "mxfp4" in llm.engine.plan.quantised_bytes
            outputs = llm.generate([prompts[2]], params) + llm.generate(prompts, params)
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert found[0] == found[1]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tensors, path = gguf_tensors(), tmp_path / "m.gguf"

    def load(tensors: list[Tensor], **more: object) -> None:
        with closing(GGUFFile.open(build.write(path, metadata(**more), tensors))) as file:
            make_decoder(ModelConfig.from_hf(gguf_to_hf_config(file)), GGUFWeights(file))

    def with_tensor(tensor: Tensor) -> list[Tensor]:
        return [tensor, *(each for each in tensors if each.name != tensor.name)]

    flat = Tensor.of("blk.0.ffn_up_exps.bias", np.zeros(576, "f4"))
    with pytest.raises(WeightsError, match=r"ffn_up_exps.bias to have 2 dimensions, got \[576\]"):
        load(with_tensor(flat))
    short = Tensor.of("blk.0.attn_sinks.weight", np.zeros(7, "f4"))
    with pytest.raises(WeightsError, match=r"self_attn\.sinks"):
        load(with_tensor(short))
    with pytest.raises(UnsupportedModelError, match="yarn_beta_fast = 16"):
        load(tensors, **{"rope.scaling.yarn_beta_fast": 16.0})
    with pytest.raises(UnsupportedModelError, match=r"attn_sinks\.bias' has no place"):
        load([*tensors, Tensor.of("blk.0.attn_sinks.bias", np.zeros(8, "f4"))])


def test_an_exponent_that_is_no_number() -> None:
    stored = torch.zeros(2, 3, 17, dtype=torch.uint8)
    stored[1, 2, 0] = 255
    for read in (quantised_of, read_as_stored):
        with pytest.raises(WeightsError, match="exponents of 255, which stand for no number"):
            read("MXFP4", stored)
    with pytest.raises(WeightsError, match="exponents of 255, which stand for no number"):
        decode_blocks("MXFP4", stored.view(6, 17).numpy(), np.empty((6, 32), np.float32))


@needs_compiler
def test_blocks_as_stored_are_the_same_weight() -> None:
    """As a GPU gets them, and as a CPU's kernel tiles them: the same numbers in the same places."""
    stored = torch.randint(250, (37, 3, 17), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    as_stored, unpacked = read_as_stored("MXFP4", stored), quantised_of("MXFP4", stored)
    assert isinstance(as_stored, StoredBlocks)
    assert isinstance(unpacked, Mxfp4Weight)
    assert torch.equal(as_stored.dequantise(), unpacked.dequantise())
    assert torch.equal(as_stored.part(5, 40).dequantise(), unpacked.dequantise()[5:])
    ours, theirs = TiledBlocks(as_stored), TiledBlocks(unpacked)
    assert torch.equal(ours.quants, theirs.quants)
    assert torch.equal(ours.scales, theirs.scales)
    assert (ours.mins, ours.bits) == (theirs.mins, theirs.bits) == (None, 4)
