"""The real file: what is in it, how fast it loads, and that its numbers are right."""

import time
from collections import Counter

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from octavo.errors import ModelNotFoundError
from octavo.models import ModelConfig, open_weights, parameter_shapes, read_config, resolve_model
from octavo.models.checkpoint import check_tensors


@pytest.fixture(scope="module")
def source():
    try:
        return resolve_model("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def weights(source):
    opened = open_weights(source)
    yield opened
    opened.close()


def test_element_types(source):
    types = Counter(info.type.name for info in source.gguf.tensors.values())
    assert types == {"Q4_1": 210, "F32": 61, "Q8_0": 1}


def test_metadata(source):
    metadata = source.gguf.metadata
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(metadata["tokenizer.ggml.merges"]) == 48900
    assert metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"


def test_config_and_tensors_fit_each_other(source, weights):
    config = ModelConfig.from_hf(read_config(source))
    check_tensors(weights, parameter_shapes(config))
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert config.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("name", "gguf_name"),
    [
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.7.input_layernorm.weight", "blk.7.attn_norm.weight"),
    ],
)
def test_numbers_equal_those_of_the_gguf_package(name, gguf_name, source, weights):
    info = source.gguf.tensors[gguf_name]
    raw = source.gguf.raw(gguf_name).reshape(-1, info.nbytes // info.shape[0])
    kind = GGMLQuantizationType[info.type.name]
    expected = raw.view("<f4") if info.type.name == "F32" else quants.dequantize(raw, kind)
    expected = torch.from_numpy(expected.reshape(info.shape).copy())
    assert torch.equal(weights.read(name, dtype=torch.float32), expected)
    rows = slice(info.shape[0] // 3, info.shape[0] // 3 + 5)
    assert torch.equal(weights.read(name, rows=rows, dtype=torch.float32), expected[rows])


def test_loading_time(weights, capsys):
    start = time.process_time()
    num_weights = sum(weights.read(name, dtype=torch.float32).numel() for name in weights.names())
    seconds = time.process_time() - start
    with capsys.disabled():
        print(f"\n{num_weights:,} weights dequantised in {seconds:.2f} s")
    assert num_weights == 134_515_008
    assert seconds < 10
