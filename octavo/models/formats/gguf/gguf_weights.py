"""GGUF tensors with Hugging Face's names, row order and conventions: dequantised, or in their blocks."""

from collections.abc import Mapping, Set
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ConfigError, FileFormatError, WeightsError
from octavo.forms.base import Storage
from octavo.models.formats.gguf.architectures import find_architecture, hugging_face_name
from octavo.models.formats.gguf.dequantize import decode_blocks, require_decodable
from octavo.models.formats.gguf.fields import ArchitectureFields
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_blocks import GGUFBlocks, quantised_of, read_as_stored, storage_of
from octavo.models.formats.gguf.header import GGUFTensorInfo
from octavo.models.formats.gguf.tensor_names import EXPERTS
from octavo.models.one_thread import one_thread
from octavo.models.weights import CPU, Part, missing_tensor, slice_bounds

# Numbers decoded at once: 1 MiB of float32 stays in a core's cache.
_CHUNK_ELEMENTS = 2**18


class GGUFWeights:
    """The tensors of a GGUF file.

    A read decodes only the blocks that hold the requested part, chunk by chunk, so no second copy of a tensor
    is ever in memory. Query and key projections are the exception: their rows are reordered.
    """

    def __init__(self, file: GGUFFile) -> None:
        """Translate the tensors' names.

        Args:
            file: an open file; closed by `close`.

        Raises:
            FileFormatError: metadata that is needed is missing or malformed.
            UnsupportedModelError: the architecture, a tensor or an element type is not supported.
            WeightsError: a tensor has more dimensions than any weight has.
        """
        where = file.path.name
        self._file = file
        self._architecture = find_architecture(file.metadata, where)
        self._infos: dict[str, GGUFTensorInfo] = {}
        for info in file.tensors.values():
            if info.name not in self._architecture.rope_tensors:
                self._infos |= self._named(info)
        self._num_heads = self._head_counts()

    def names(self) -> Set[str]:
        """Return the Hugging Face names of all tensors but rotary factors, which are part of the config."""
        return self._infos.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; see WeightSource."""
        return self._info(name).shape

    def read(self, name: str, *, rows: Part = None, columns: Part = None, dtype: torch.dtype) -> Tensor:
        """Read and dequantise a tensor or a part of it; see WeightSource.

        Rows of queries and keys are decoded in whole heads, columns in whole blocks, then trimmed.
        """
        info = self._info(name)
        num_heads = self._num_heads_of(name)
        if num_heads:
            return self._read_heads(info, num_heads, rows, columns, dtype)
        if name.endswith("norm.weight") and self._architecture.norm_offset:
            stored = _read_part(self._file, info, rows, columns, torch.float32)
            return stored.sub_(self._architecture.norm_offset).to(dtype)
        return _read_part(self._file, info, rows, columns, dtype)

    def storage(self) -> Mapping[str, Storage]:
        """See QuantisedSource."""
        return {
            name: storage_of(info.type.name)
            for name, info in self._infos.items()
            if len(info.shape) == 2 and info.type.block_size > 1
        }

    def read_quantised(
        self, name: str, *, rows: Part = None, columns: Part = None, device: torch.device = CPU
    ) -> GGUFBlocks:
        """Read a matrix in its blocks; see QuantisedSource."""
        info = self._info(name)
        first, last = slice_bounds(columns, info.shape[1])
        if first % info.type.block_size or last % info.type.block_size:
            raise ConfigError(
                f"{self._file.path.name}: {info.name} can only be cut between its blocks of "
                f"{info.type.block_size} columns, not into columns {first} to {last}; use fewer ranks, or "
                'quantization="none"'
            )
        start, stop = slice_bounds(rows, info.shape[0])
        num_heads = self._num_heads_of(name)
        unit = self._head_dim(info, num_heads) if num_heads else 1
        whole = slice(start // unit * unit, -(-stop // unit) * unit)
        weight = _read_blocks(self._file, info, whole, slice(first, last), device)
        if not num_heads:
            return weight
        order = _halves_apart(torch.arange(weight.shape[0]), unit)
        return weight.take(order[start - whole.start : stop - whole.start].to(device))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _named(self, info: GGUFTensorInfo) -> dict[str, GGUFTensorInfo]:
        """Check a tensor; return it by its name, or each matrix or bias in a stack of experts by theirs."""
        where = self._file.path.name
        require_decodable(info.type.name, f"{where}: {info.name}")
        name = hugging_face_name(info.name, self._architecture, where)
        num_dimensions = 2 if name.endswith(".bias") else 3
        is_stack = EXPERTS in name
        if len(info.shape) not in ((num_dimensions,) if is_stack else (1, 2)):
            expected = f"{num_dimensions} dimensions" if is_stack else "at most 2 dimensions"
            raise WeightsError(f"{where}: expected {info.name} to have {expected}, got {list(info.shape)}")
        if name.endswith("shared_expert_gate.weight"):
            # The converter drops the dimension of its one row.
            return {name: replace(info, shape=(1, info.shape[-1]))}
        if not is_stack:
            return {name: info}
        # The rows of an expert's gate stand before those of its up projection.
        parts = ("gate_proj", "up_proj") if "gate_up_proj" in name else ("",)
        num_rows, rest = divmod(info.shape[1], len(parts))
        if rest:
            raise WeightsError(f"{where}: expected {info.name} to have an even number of rows")
        nbytes = info.nbytes // (info.shape[0] * len(parts))
        return {
            name.replace(EXPERTS, f".experts.{number // len(parts)}.").replace("gate_up_proj", part): replace(
                info, shape=(num_rows, *info.shape[2:]), offset=info.offset + number * nbytes, nbytes=nbytes
            )
            for number, part in enumerate(parts * info.shape[0])
        }

    def _info(self, name: str) -> GGUFTensorInfo:
        if name not in self._infos:
            raise missing_tensor(self._file.path.name, name, self._infos)
        return self._infos[name]

    def _num_heads_of(self, name: str) -> int:
        """Return the heads of a projection whose rows are interleaved, 0 for other tensors."""
        return self._num_heads.get(name.rpartition(".")[0].rpartition(".")[2], 0)

    def _head_counts(self) -> dict[str, int]:
        """Return the number of heads of each projection whose rows are interleaved."""
        if not self._architecture.interleaves_heads:
            return {}
        fields = ArchitectureFields(self._file, self._architecture)
        num_heads = fields.integer("attention.head_count")
        num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
        return {"q_proj": num_heads, "k_proj": num_kv_heads}

    def _read_heads(
        self,
        info: GGUFTensorInfo,
        num_heads: int,
        rows: Part,
        columns: Part,
        dtype: torch.dtype,
    ) -> Tensor:
        """Read rows of heads and undo the converter's order."""
        head_dim = self._head_dim(info, num_heads)
        start, stop = slice_bounds(rows, info.shape[0])
        first = start // head_dim * head_dim
        last = -(-stop // head_dim) * head_dim
        stored = _read_part(self._file, info, slice(first, last), columns, dtype)
        return _halves_apart(stored, head_dim)[start - first : stop - first]

    def _head_dim(self, info: GGUFTensorInfo, num_heads: int) -> int:
        head_dim, rest = divmod(info.shape[0], num_heads)
        if rest or head_dim % 2:
            raise FileFormatError(
                f"{self._file.path.name}: expected {info.name} to have {num_heads} heads of an even "
                f"dimension, got {info.shape[0]} rows"
            )
        return head_dim


def _halves_apart(rows: Tensor, head_dim: int) -> Tensor:
    """Undo the converter's order of the rows of whole heads.

    one head, in the file:      0, D/2, 1, D/2 + 1, ...
    on Hugging Face:             0, 1, ..., D/2, D/2 + 1, ...
    """
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _read_blocks(
    file: GGUFFile, info: GGUFTensorInfo, rows: slice, columns: slice, device: torch.device
) -> GGUFBlocks:
    """Read a part of a matrix to a device, rows in the file's order, columns at blocks of the file."""
    kind, (num_rows, num_columns) = info.type, info.shape
    row_bytes = info.nbytes // num_rows
    stored = np.empty((rows.stop - rows.start, num_columns // kind.block_size, kind.block_bytes), np.uint8)
    file.read_into(info, rows.start * row_bytes, stored.reshape(-1))
    part = slice(columns.start // kind.block_size, columns.stop // kind.block_size)
    blocks = torch.from_numpy(stored)[:, part].to(device)
    return (read_as_stored if device.type == "cpu" else quantised_of)(kind.name, blocks)


def _read_part(file: GGUFFile, info: GGUFTensorInfo, rows: Part, columns: Part, dtype: torch.dtype) -> Tensor:
    """Decode a part of a tensor, rows in the file's order."""
    if len(info.shape) == 1:
        assert columns is None, f"{info.name} has no columns"
        return _read_matrix(file, info, (0, 1), slice_bounds(rows, info.shape[0]), dtype)[0]
    num_rows, num_columns = info.shape
    return _read_matrix(file, info, slice_bounds(rows, num_rows), slice_bounds(columns, num_columns), dtype)


def _read_matrix(
    file: GGUFFile, info: GGUFTensorInfo, rows: tuple[int, int], columns: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Decode rows [start, stop) and columns [start, stop) of a tensor viewed as a matrix.

    blocks of a row     [        |        |        |        ]
    columns                          [ start .. stop )
    decoded                      [        |        ]  then trimmed
    """
    kind = info.type
    num_matrix_rows = 1 if len(info.shape) == 1 else info.shape[0]
    row_bytes = info.nbytes // num_matrix_rows
    first_block, last_block = columns[0] // kind.block_size, -(-columns[1] // kind.block_size)
    trimmed = slice(columns[0] - first_block * kind.block_size, columns[1] - first_block * kind.block_size)
    chunk_rows = max(1, _CHUNK_ELEMENTS // (row_bytes // kind.block_bytes * kind.block_size))
    chunk_rows = min(chunk_rows, rows[1] - rows[0])
    out = torch.empty(rows[1] - rows[0], columns[1] - columns[0], dtype=dtype)
    stored = np.empty((chunk_rows, row_bytes // kind.block_bytes, kind.block_bytes), np.uint8)
    decoded = np.empty((chunk_rows, last_block - first_block, kind.block_size), np.float32)
    with one_thread:
        for row in range(rows[0], rows[1], max(1, chunk_rows)):
            num_rows = min(chunk_rows, rows[1] - row)
            file.read_into(info, row * row_bytes, stored[:num_rows].reshape(-1))
            blocks = stored[:num_rows, first_block:last_block].reshape(-1, kind.block_bytes)
            decode_blocks(kind.name, blocks, decoded[:num_rows].reshape(-1, kind.block_size))
            values = torch.from_numpy(decoded[:num_rows].reshape(num_rows, -1))
            out[row - rows[0] : row - rows[0] + num_rows] = values[:, trimmed]
    return out
