"""Decoding of blocks against the gguf package, the format's own reference in Python."""

import gguf_builder as build
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from gguf_builder import Tensor

from octavo.errors import UnsupportedModelError
from octavo.models.formats.gguf.dequantize import decode_blocks
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.header import GGML_TYPES

OWN = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
IDS = {kind.name: type_id for type_id, kind in GGML_TYPES.items()}
# Bytes of a block that hold float16 scales; random ones could be inf or NaN.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}


def decoded(name: str, blocks: np.ndarray) -> np.ndarray:
    kind = GGML_TYPES[IDS[name]]
    out = np.full((len(blocks), kind.block_size), np.nan, np.float32)
    decode_blocks(name, blocks, out)
    return out


def random_blocks(name: str, count: int = 64) -> np.ndarray:
    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (count, GGML_TYPES[IDS[name]].block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        # 255 stands for no number.
        blocks[:, 0] = random.integers(0, 250, len(blocks))
    for start in SCALES[name]:
        blocks[:, start : start + 2] = random.normal(0, 0.1, (count, 1)).astype("<f2").view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", OWN)
def test_quantised_data_decodes_bit_for_bit(name):
    values = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    kind = GGMLQuantizationType[name]
    stored = np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8)
    blocks = stored.reshape(-1, GGML_TYPES[IDS[name]].block_bytes)
    expected = quants.dequantize(stored.view(np.float16) if name == "F16" else stored, kind)
    assert decoded(name, blocks).reshape(16, 256).tobytes() == expected.tobytes()
    # Of floats with one bit behind the first, the largest lie far apart.
    assert np.abs(decoded(name, blocks).reshape(16, 256) - values).max() < (1.0 if name == "MXFP4" else 0.5)


@pytest.mark.parametrize("name", SCALES)
def test_random_bytes_decode_bit_for_bit(name):
    blocks = random_blocks(name)
    expected = quants.dequantize(blocks, GGMLQuantizationType[name])
    assert decoded(name, blocks).tobytes() == expected.tobytes()


def test_q8_k_is_scale_times_bytes():
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (8, 292), dtype=np.uint8)
    scales = random.normal(size=(8, 1)).astype("<f4")
    blocks[:, :4] = scales.view(np.uint8)
    assert (decoded("Q8_K", blocks) == scales * blocks[:, 4:260].view(np.int8)).all()


def test_float32_is_taken_as_it_is():
    values = np.random.default_rng(0).standard_normal(100).astype("<f4")
    assert decoded("F32", values.view(np.uint8).reshape(-1, 4)).tobytes() == values.tobytes()


def test_sizes_of_types_agree_with_the_gguf_package():
    for type_id, kind in GGML_TYPES.items():
        theirs = GGMLQuantizationType[kind.name]
        assert theirs.value == type_id
        if kind.name != "Q8_1":  # the package still has its older layout
            assert GGML_QUANT_SIZES[theirs] == (kind.block_size, kind.block_bytes)


@pytest.mark.parametrize(
    "name", sorted(GGML_TYPES[i].name for i in GGML_TYPES if GGML_TYPES[i].name[:2] in ("IQ", "TQ"))
)
def test_other_types_are_refused_by_name_when_the_file_is_opened(name, tmp_path):
    kind = GGML_TYPES[IDS[name]]
    tensor = Tensor("token_embd.weight", (kind.block_size, 2), bytes(2 * kind.block_bytes), IDS[name])
    path = build.write(tmp_path / "m.gguf", build.metadata_of("llama"), [tensor])
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedModelError, match=f"{name}, which is not"):
        GGUFWeights(file)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_part_equals_that_part_of_the_whole(name, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.models.formats.gguf.gguf_weights._CHUNK_ELEMENTS", 2048)
    kind = GGML_TYPES[IDS[name]]
    blocks = random_blocks(name, count=10 * 768 // kind.block_size)
    tensor = Tensor("token_embd.weight", (768, 10), blocks.tobytes(), IDS[name])
    path = build.write(tmp_path / "m.gguf", build.metadata_of("llama"), [tensor])
    whole = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[name]).reshape(10, 768)).to(dtype)
    with GGUFFile.open(path) as file:
        weights = GGUFWeights(file)
        for rows in (None, slice(0, 1), slice(3, 9), slice(10, 10)):
            for columns in (None, slice(0, 32), slice(5, 6), slice(250, 700), slice(760, 768)):
                part = weights.read("model.embed_tokens.weight", rows=rows, columns=columns, dtype=dtype)
                assert part.is_contiguous()
                assert torch.equal(part, whole[rows or slice(None), columns or slice(None)])
