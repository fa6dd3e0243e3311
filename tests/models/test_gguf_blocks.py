"""GGUF matrices in their own blocks: the same numbers as those that are decoded, whole and in part."""

from collections.abc import Iterator
from pathlib import Path

import gguf_builder as build
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_builder import Tensor, metadata_of, tensors_of
from test_gguf_dequantize import IDS, random_blocks

from octavo.errors import ConfigError
from octavo.forms.base import join_rows
from octavo.forms.stored_blocks import StoredBlocks
from octavo.gemm.cpu.block_linear import TiledBlocks
from octavo.gemm.cpu.library import compile_failure
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_blocks import blocks_of, read_as_stored, storage_of
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.header import GGML_TYPES
from octavo.models.weights import QuantisedSource

NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def stored(name: str, rows: int, columns: int) -> np.ndarray:
    kind = GGML_TYPES[IDS[name]]
    blocks = random_blocks(name, rows * columns // kind.block_size)
    return blocks.reshape(rows, columns // kind.block_size, kind.block_bytes)


def decoded(name: str, blocks: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(blocks.reshape(len(blocks), -1), GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", NAMES)
def test_no_number_changes(name: str) -> None:
    blocks = stored(name, 6, 1024)
    weight = blocks_of(name, torch.from_numpy(blocks))
    assert torch.equal(weight.dequantise(), decoded(name, blocks))
    num_bytes = weight.shape[1] * weight.bits / 8 + weight.scales[0].nbytes
    num_bytes += 0 if weight.mins is None else weight.mins[0].nbytes
    assert num_bytes == storage_of(name).bytes_per_number * weight.shape[1]


@pytest.mark.skipif(compile_failure() is not None, reason="needs a C compiler")
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("num_rows", [None, 24, 25])
def test_tiles_of_stored_blocks_are_those_of_unpacked_ones(name: str, num_rows: int | None) -> None:
    blocks = torch.from_numpy(stored(name, 19, 96))
    weight, order = read_as_stored(name, blocks), torch.randperm(19)
    assert isinstance(weight, StoredBlocks)
    tiles = TiledBlocks(weight.take(order), num_rows=num_rows)
    expected = TiledBlocks(blocks_of(name, blocks[order]), num_rows=num_rows)
    assert tiles.shape == expected.shape
    assert (tiles.mins is None) == (name == "Q8_0")
    got, wanted = ((each.quants, each.scales, each.mins) for each in (tiles, expected))
    for tensor, other in zip(got, wanted, strict=True):
        assert tensor is other is None or torch.equal(torch.as_tensor(tensor), torch.as_tensor(other))


def test_stored_blocks_can_be_taken_and_joined() -> None:
    blocks = torch.from_numpy(stored("Q4_1", 11, 64))
    first, second = read_as_stored("Q4_1", blocks[:6]), read_as_stored("Q4_1", blocks[6:])
    (joined,) = join_rows([first, second])
    assert joined.shape == (11, 64)
    assert torch.equal(joined.dequantise(), decoded("Q4_1", blocks.numpy()))
    order = torch.tensor([10, 0, 5, 6])
    assert torch.equal(joined.take(order).dequantise(), joined.dequantise()[order])


def test_scales_beyond_float16_stay_exact() -> None:
    """The minimum of a Q4_0 is -8 times its scale."""
    blocks = stored("Q4_0", 1, 32)
    blocks[..., :2] = np.array([60000.0], "<f2").view(np.uint8)
    weight = blocks_of("Q4_0", torch.from_numpy(blocks))
    assert weight.scales.dtype == torch.float32
    assert torch.equal(weight.dequantise(), decoded("Q4_0", blocks))


def test_other_types_have_none() -> None:
    found = [name for name in IDS if storage_of(name).kind == "blocks"]
    assert found == sorted(NAMES, key=lambda name: IDS[name])


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[GGUFWeights]:
    """A llama whose first layer is stored in blocks, of heads of 8 rows."""
    tensors = {tensor.name: tensor for tensor in tensors_of("llama")}
    for name, kind, rows in (("attn_q", "Q4_1", 32), ("attn_v", "Q8_0", 16), ("ffn_down", "Q4_K", 16)):
        data = stored(kind, rows, 512).tobytes()
        tensors[f"blk.0.{name}.weight"] = Tensor(f"blk.0.{name}.weight", (512, rows), data, IDS[kind])
    path = build.write(tmp_path / "m.gguf", metadata_of("llama"), list(tensors.values()))
    with GGUFFile.open(path) as file:
        yield GGUFWeights(file)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"])
@pytest.mark.parametrize("rows", [None, slice(8, 16), slice(3, 13)])
@pytest.mark.parametrize("columns", [None, slice(0, 256), slice(256, 512)])
def test_parts_are_those_of_decoded_tensors(
    weights: GGUFWeights, name: str, rows: slice | None, columns: slice | None
) -> None:
    name = f"model.layers.0.{name}.weight"
    assert isinstance(weights, QuantisedSource)
    assert name in weights.storage()
    expected = weights.read(name, rows=rows, columns=columns, dtype=torch.float32)
    assert torch.equal(weights.read_quantised(name, rows=rows, columns=columns).dequantise(), expected)


def test_a_cut_through_a_block_is_refused(weights: GGUFWeights) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ConfigError, match=r"ffn_down\.weight can only be cut between its blocks of 256 col"):
        weights.read_quantised(name, columns=slice(0, 128))


def test_vectors_and_floats_are_not_among_them(weights: GGUFWeights) -> None:
    names = weights.storage()
    assert len(names) == 3
    assert "model.norm.weight" not in names
