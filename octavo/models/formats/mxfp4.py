"""Checkpoints of experts in MXFP4, as gpt-oss has them: all experts of a layer in one tensor.

    X.mlp.experts.gate_up_proj_blocks    [E, 2 n, K / 32, 16] uint8    two numbers in a byte, low bits first
    X.mlp.experts.gate_up_proj_scales    [E, 2 n, K / 32] uint8        exponents, each 127 too large
    X.mlp.experts.down_proj_blocks       [E, K, n / 32, 16] uint8
    X.mlp.experts.down_proj_scales       [E, K, n / 32] uint8

Rows of gate and up take turns. Here each expert has matrices of its own: X.mlp.experts.3.gate_proj.weight.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError, WeightsError
from octavo.forms.base import Storage
from octavo.forms.mxfp4 import BLOCK, MXFP4, Mxfp4Weight, blocks_of, check_exponents
from octavo.models.config_fields import ConfigFields
from octavo.models.experts.gpt_oss import PARTS
from octavo.models.formats.quantised_tensors import (
    QuantisedTensors,
    check_tensor,
    check_the_rest,
)
from octavo.models.formats.scheme_fields import check_patterns
from octavo.models.weights import Part, StoredTensors, slice_bounds

_KEYS = frozenset({"dequantize", "modules_to_not_convert", "quant_method"})
_TYPE = "U8"
_BLOCK_BYTES = BLOCK // 2
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)_blocks")


def read_mxfp4(fields: ConfigFields) -> "Mxfp4Scheme":
    """Read quant_method "mxfp4"; see schemes.read_scheme."""
    fields.require_known(_KEYS)
    fields.require_one_of("dequantize", (False, None))
    check_patterns(fields, "modules_to_not_convert")
    return Mxfp4Scheme()


class Mxfp4Scheme:
    """A Scheme of experts in MXFP4."""

    def open(self, tensors: StoredTensors) -> QuantisedTensors:
        """See Scheme."""
        matrices: dict[str, _Matrix] = {}
        for name in sorted(tensors.names()):
            match = _STACK.fullmatch(name)
            if match is not None:
                for matrix in _open_stack(tensors, name, match[1], match[2]):
                    matrices[matrix.name] = matrix
        check_the_rest(tensors, set().union(*(matrix.tensors for matrix in matrices.values())))
        return QuantisedTensors(tensors, matrices, {})


def _open_stack(tensors: StoredTensors, blocks: str, experts: str, projection: str) -> Iterator["_Matrix"]:
    """Check a stack [E, N, K / 32, 16] and its scales; yield its experts' matrices."""
    scales = f"{experts}.{projection}_scales"
    if tensors.type_name(blocks) != _TYPE:
        raise UnsupportedModelError(f"{blocks} has the type {tensors.type_name(blocks)}; expected {_TYPE}")
    parts, shape = PARTS[projection], tensors.shape(blocks)
    if len(shape) != 4 or shape[3] != _BLOCK_BYTES or shape[1] % len(parts):
        raise WeightsError(
            f"{blocks} is {list(shape)}, expected [experts, rows, columns / {BLOCK}, {_BLOCK_BYTES}], with "
            "as many rows of gate as of up"
        )
    check_tensor(tensors, scales, blocks, shape[:3], {_TYPE})
    size = (shape[1] // len(parts), shape[2] * BLOCK)
    for expert in range(shape[0]):
        for first, part in enumerate(parts):
            name = f"{experts}.{expert}.{part}.weight"
            yield _Matrix(tensors, name, (blocks, scales), expert, size, first, len(parts))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A StoredMatrix: of an expert of a stack, the rows first, first + step, ..."""

    source: StoredTensors
    name: str
    stacks: tuple[str, str]
    expert: int
    shape: tuple[int, int]
    first: int
    step: int

    @property
    def storage(self) -> Storage:
        """See StoredMatrix."""
        return MXFP4

    @property
    def tensors(self) -> Set[str]:
        """See StoredMatrix."""
        return set(self.stacks)

    def read(self, rows: Part, columns: Part, device: torch.device) -> Mxfp4Weight:
        """See StoredMatrix.

        Raises:
            ConfigError: columns cut numbers that share an exponent.
            WeightsError: an exponent stands for no number.
        """
        blocks = blocks_of(self.name, *slice_bounds(columns, self.shape[1]))
        values, exponents = (self._read(stack, rows, blocks) for stack in self.stacks)
        check_exponents(self.stacks[1], exponents)
        return Mxfp4Weight(values.flatten(1), exponents).to(device)

    def _read(self, stack: str, rows: Part, blocks: slice) -> Tensor:
        """Read this matrix's rows of a stack: [n, blocks, ...]."""
        start, stop = slice_bounds(rows, self.shape[0])
        turns = slice(self.step * start, self.step * stop)
        part = self.source.read_stored(stack, rows=slice(self.expert, self.expert + 1), columns=turns)
        return part[0, self.first :: self.step, blocks].contiguous()
