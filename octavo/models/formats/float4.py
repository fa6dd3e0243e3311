"""Checkpoints of 4-bit floats (e2m1): MXFP4 and NVFP4, by the names of ModelOpt, compressed-tensors, gpt-oss.

    ModelOpt            compressed-tensors
    X.weight            X.weight_packed         [N, K / 2] uint8: two numbers, the first one in the low bits
    X.weight_scale      X.weight_scale          MXFP4: [N, K / 32] uint8, exponents, each 127 too large
                                                NVFP4: [N, K / 16] float8 (e4m3)
    X.weight_scale_2    X.weight_global_scale   NVFP4: [1], a factor of all scales, or its inverse
    X.input_scale       X.input_global_scale    [1], of activations; checked and not used

MXFP4 keeps its form. A number of NVFP4 is doubled, which makes it an integer of 8 bits in groups of 16: no
kernel reads NVFP4 itself. gpt-oss has all experts of a layer in one tensor of MXFP4:

    X.mlp.experts.gate_up_proj_blocks    [E, 2 n, K / 32, 16] uint8    two numbers in a byte, low bits first
    X.mlp.experts.gate_up_proj_scales    [E, 2 n, K / 32] uint8        exponents, each 127 too large
    X.mlp.experts.down_proj_blocks       [E, K, n / 32, 16] uint8
    X.mlp.experts.down_proj_scales       [E, K, n / 32] uint8

Rows of gate and up alternate. Here each expert has matrices of its own: X.mlp.experts.3.gate_proj.weight.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError, WeightsError
from octavo.forms.base import QuantisedWeight, Storage
from octavo.forms.blocks import BlockWeight
from octavo.forms.mxfp4 import (
    BLOCK,
    MXFP4,
    MXFP4_DENSE,
    Mxfp4Weight,
    block_slice,
    check_exponents,
    doubled,
)
from octavo.models.config_fields import ConfigFields
from octavo.models.experts.names import PARTS
from octavo.models.formats.integers.packed_matrix import groups_of
from octavo.models.formats.matrix_schemes import MatrixScheme
from octavo.models.formats.quantised_tensors import (
    FLOATS,
    QuantisedTensors,
    check_tensor,
    check_the_rest,
    matrix_shape,
)
from octavo.models.formats.scheme_fields import check_patterns
from octavo.models.weights import Part, StoredTensors, slice_bounds

_NUMBERS, _EXPONENTS, _SCALES = "U8", "U8", "F8_E4M3"
_NV_GROUPS = (16, 32)


@dataclass(frozen=True, slots=True)
class Float4Names:
    """What a tool calls the tensors of a matrix.

    Attributes:
        numbers: [N, K / 2].
        factor: of the scales of NVFP4.
        divides: scales are divided by the factor.
        inputs: scale of activations.
    """

    numbers: str
    factor: str
    divides: bool
    inputs: str


MODELOPT = Float4Names("weight", "weight_scale_2", divides=False, inputs="input_scale")
COMPRESSED = Float4Names("weight_packed", "weight_global_scale", divides=True, inputs="input_global_scale")


@dataclass(frozen=True, slots=True)
class Float4Scheme(MatrixScheme):
    """A Scheme of 4-bit floats.

    Attributes:
        own: names of tensors.
        is_nv: NVFP4, else MXFP4.
    """

    own: Float4Names
    is_nv: bool

    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        return name.endswith(f".{self.own.numbers}") and tensors.type_name(name) == _NUMBERS

    def fits(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        scale = name.removesuffix(self.own.numbers) + "weight_scale"
        return scale in tensors.names() and tensors.type_name(scale) == (
            _SCALES if self.is_nv else _EXPONENTS
        )

    def matrix(self, tensors: StoredTensors, name: str) -> "_Nvfp4Matrix | _Mxfp4Matrix":
        """See MatrixScheme."""
        layer, (num_rows, num_bytes) = name.removesuffix(self.own.numbers), matrix_shape(tensors, name)
        shape, scale = (num_rows, 2 * num_bytes), f"{layer}weight_scale"
        inputs = {layer + self.own.inputs} & tensors.names()
        for each in inputs:
            check_tensor(tensors, each, name, (1,), FLOATS)
        if self.is_nv:
            factor = layer + self.own.factor
            check_tensor(tensors, factor, name, (1,), FLOATS)
            group = _group_of(tensors, scale, name, shape)
            used = {name, scale, factor} | inputs
            return _Nvfp4Matrix(tensors, name, shape, used, scale, factor, self.own.divides, group)
        if shape[1] % BLOCK:
            raise WeightsError(f"{name} has {shape[1]} columns, expected a multiple of {BLOCK}")
        check_tensor(tensors, scale, name, (shape[0], shape[1] // BLOCK), {_EXPONENTS})
        return _Mxfp4Matrix(tensors, name, shape, {name, scale} | inputs, scale)


def _group_of(tensors: StoredTensors, scale: str, name: str, shape: tuple[int, int]) -> int:
    """Check scales of NVFP4, and return how many columns share one.

    Raises:
        WeightsError: they are missing, or for other groups than of 16 or 32 columns.
        UnsupportedModelError: they are not float8.
    """
    if scale not in tensors.names():
        raise WeightsError(f"the checkpoint lacks {scale}, which belongs to {name}")
    found, kind = tensors.shape(scale), tensors.type_name(scale)
    if kind != _SCALES:
        raise UnsupportedModelError(f"{scale} has the type {kind}; expected {_SCALES}")
    for group in _NV_GROUPS:
        if found == (shape[0], shape[1] // group) and shape[1] % group == 0:
            return group
    expected = " or ".join(str([shape[0], shape[1] // group]) for group in _NV_GROUPS)
    raise WeightsError(f"{scale} is {list(found)}, expected {expected}")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The fields of both kinds of StoredMatrix below."""

    source: StoredTensors
    name: str
    shape: tuple[int, int]
    tensors: Set[str]
    scale_name: str


@dataclass(frozen=True, slots=True)
class _Mxfp4Matrix(_Matrix):
    """A StoredMatrix of MXFP4."""

    @property
    def storage(self) -> Storage:
        return MXFP4 if ".experts." in self.name else MXFP4_DENSE

    def read(self, rows: Part, columns: Part, device: torch.device) -> QuantisedWeight:
        """See StoredMatrix.

        Raises:
            ConfigError: columns cut numbers that share an exponent.
            WeightsError: an exponent stands for no number.
        """
        start, stop = slice_bounds(columns, self.shape[1])
        blocks = block_slice(self.name, start, stop)
        numbers = self.source.read_stored(self.name, rows=rows, columns=slice(start // 2, stop // 2))
        exponents = self.source.read_stored(self.scale_name, rows=rows, columns=blocks)
        check_exponents(self.scale_name, exponents)
        return Mxfp4Weight(numbers, exponents).to(device)


@dataclass(frozen=True, slots=True)
class _Nvfp4Matrix(_Matrix):
    """A StoredMatrix of NVFP4."""

    factor_name: str
    divides: bool
    group: int

    @property
    def storage(self) -> Storage:
        """See StoredMatrix: a byte for a number, and a float32, or two float16 on a GPU, for a group."""
        num_bytes = 1 + 4 / self.group
        form = f"NVFP4 in groups of {self.group}, as 8 bits"
        return Storage("blocks", num_bytes, bytes_on_gpu=num_bytes, form=form, tile=(1, self.group))

    def read(self, rows: Part, columns: Part, device: torch.device) -> QuantisedWeight:
        """See StoredMatrix.

        Raises:
            ConfigError: columns cut a group.
            WeightsError: scales are not finite.
        """
        columns, groups = groups_of(self.name, self.shape[1], self.group).cut(columns)
        pairs = slice(columns.start // 2, columns.stop // 2)
        numbers = self.source.read_stored(self.name, rows=rows, columns=pairs).to(device)
        scales = self.source.read_stored(self.scale_name, rows=rows, columns=groups).to(device).float()
        scales = self._scaled(scales)
        if not bool(scales.isfinite().all()):
            raise WeightsError(f"{self.scale_name} and {self.factor_name} must make finite numbers")
        return BlockWeight(8, doubled(numbers), scales, None)

    def _scaled(self, scales: Tensor) -> Tensor:
        """Return what a number's double is multiplied by."""
        factor = self.source.read_stored(self.factor_name).to(scales.device).float()
        return (scales / factor if self.divides else scales * factor) / 2


_KEYS = frozenset({"dequantize", "modules_to_not_convert", "quant_method"})
_BYTES = "U8"
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
        matrices: dict[str, _ExpertMatrix] = {}
        for name in sorted(tensors.names()):
            match = _STACK.fullmatch(name)
            if match is not None:
                for matrix in _open_stack(tensors, name, match[1], match[2]):
                    matrices[matrix.name] = matrix
        check_the_rest(tensors, set().union(*(matrix.tensors for matrix in matrices.values())))
        return QuantisedTensors(tensors, matrices, {})


def _open_stack(
    tensors: StoredTensors, blocks: str, experts: str, projection: str
) -> Iterator["_ExpertMatrix"]:
    """Check a stack [E, N, K / 32, 16] and its scales; yield its experts' matrices."""
    scales = f"{experts}.{projection}_scales"
    if tensors.type_name(blocks) != _BYTES:
        raise UnsupportedModelError(f"{blocks} has the type {tensors.type_name(blocks)}; expected {_BYTES}")
    parts, shape = PARTS[projection], tensors.shape(blocks)
    if len(shape) != 4 or shape[3] != _BLOCK_BYTES or shape[1] % len(parts):
        raise WeightsError(
            f"{blocks} is {list(shape)}, expected [experts, rows, columns / {BLOCK}, {_BLOCK_BYTES}], with "
            "as many rows of gate as of up"
        )
    check_tensor(tensors, scales, blocks, shape[:3], {_BYTES})
    size = (shape[1] // len(parts), shape[2] * BLOCK)
    for expert in range(shape[0]):
        for first, part in enumerate(parts):
            name = f"{experts}.{expert}.{part}.weight"
            yield _ExpertMatrix(tensors, name, (blocks, scales), expert, size, first, len(parts))


@dataclass(frozen=True, slots=True)
class _ExpertMatrix:
    """A StoredMatrix: the rows first, first + step, ... of an expert in a stack."""

    source: StoredTensors
    name: str
    stacks: tuple[str, str]
    expert: int
    shape: tuple[int, int]
    first: int
    step: int

    @property
    def storage(self) -> Storage:
        return MXFP4

    @property
    def tensors(self) -> Set[str]:
        return set(self.stacks)

    def read(self, rows: Part, columns: Part, device: torch.device) -> Mxfp4Weight:
        """See StoredMatrix.

        Raises:
            ConfigError: columns cut numbers that share an exponent.
            WeightsError: an exponent stands for no number.
        """
        blocks = block_slice(self.name, *slice_bounds(columns, self.shape[1]))
        values, exponents = (self._read(stack, rows, blocks) for stack in self.stacks)
        check_exponents(self.stacks[1], exponents)
        return Mxfp4Weight(values.flatten(1), exponents).to(device)

    def _read(self, stack: str, rows: Part, blocks: slice) -> Tensor:
        """Read this matrix's rows of a stack: [n, blocks, ...]."""
        start, stop = slice_bounds(rows, self.shape[0])
        turns = slice(self.step * start, self.step * stop)
        part = self.source.read_stored(stack, rows=slice(self.expert, self.expert + 1), columns=turns)
        return part[0, self.first :: self.step, blocks].contiguous()
