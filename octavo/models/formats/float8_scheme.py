"""Checkpoints of float8 (e4m3) matrices with scales beside them.

    X.weight              [N, K] F8_E4M3
    X.weight_scale_inv    [N / 128, K / 128]: weight = number * scale; or
    X.weight_scale        the same, or [N / 128, 1, K / 128, 1]; or [N, 1] or [N], one for each row; or [1]
                          or of MXFP8 [N, K / 32] uint8: exponents, each 127 too large
    X.input_scale         [1], of activations; transformers calls it activation_scale

A matrix is quantised if its type says so: lists of exceptions in config.json are often longer or shorter.
Input scales are checked and not used: activations are quantised, if at all, by scales of their own rows,
which is at least as exact.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedModelError, WeightsError
from octavo.forms.base import Storage
from octavo.forms.float8 import FLOAT8_ROWS, Float8Weight
from octavo.models.config_fields import ConfigFields, words
from octavo.models.formats.matrix_schemes import MatrixScheme
from octavo.models.formats.quantised_tensors import FLOATS, matrix_shape
from octavo.models.formats.scheme_fields import check_cache, check_patterns, read_block
from octavo.models.weights import Part, StoredTensors, slice_bounds

_TYPE, _EXPONENTS = "F8_E4M3", "U8"
_FP8_KEYS = words(
    "activation_scheme dequantize expert_dtype fmt ignored_layers kv_cache_scheme modules_to_convert",
    "modules_to_not_convert quant_method scale_fmt weight_block_size",
)


def read_fp8(fields: ConfigFields) -> "Float8Scheme":
    """Read quant_method "fp8": a scale for each tile of weight_block_size, or for each matrix."""
    fields.require_known(_FP8_KEYS)
    fields.require_one_of("fmt", ("e4m3", None))
    fields.require_one_of("activation_scheme", ("dynamic", "static", None))
    fields.require_one_of("scale_fmt", ("float", "ue8m0", None))
    fields.require_one_of("dequantize", (False, None))
    fields.require_one_of("expert_dtype", ("fp8", None))
    for name in ("ignored_layers", "modules_to_convert", "modules_to_not_convert"):
        check_patterns(fields, name)
    # AutoFP8 has a word instead of an object.
    if fields.get("kv_cache_scheme") != "static":
        check_cache(fields)
    has_input_scales = fields.get("activation_scheme") == "static"
    if fields.get("weight_block_size") is None:
        return Float8Scheme("weight_scale", None, has_input_scales)
    return Float8Scheme("weight_scale_inv", read_block(fields, "weight_block_size"), has_input_scales)


@dataclass(frozen=True, slots=True)
class Float8Scheme(MatrixScheme):
    """A Scheme of float8 matrices.

    Attributes:
        scale_name: last part of the name of scales: "weight_scale" or "weight_scale_inv".
        tile: rows and columns that share a scale; None: a scale for each row, or for the matrix.
        has_input_scales: activations have scales as well.
        has_exponents: scales are powers of two.
    """

    scale_name: str
    tile: tuple[int, int] | None
    has_input_scales: bool
    has_exponents: bool = False

    @property
    def tile_rows(self) -> int:
        """See MatrixScheme."""
        return self.tile[0] if self.tile else 1

    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        return tensors.type_name(name) == _TYPE and name.endswith(".weight")

    def fits(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        scale, shape = name.removesuffix("weight") + self.scale_name, tensors.shape(name)
        if scale not in tensors.names() or len(shape) != 2:
            return False
        rows, columns = shape
        if (tensors.type_name(scale) == _EXPONENTS) != self.has_exponents:
            return False
        tiles = self.tile and (-(-rows // self.tile[0]), -(-columns // self.tile[1]))
        return _trimmed(tensors.shape(scale)) in ([_trimmed(tiles)] if tiles else [(), _trimmed((rows,))])

    def matrix(self, tensors: StoredTensors, name: str) -> "_Matrix":
        """See MatrixScheme."""
        layer = name.removesuffix("weight")
        names, shape = tensors.names(), matrix_shape(tensors, name)
        scale, input_scale = layer + self.scale_name, f"{layer}input_scale"
        if self.tile is None and scale not in names and f"{scale}_inv" in names:
            # transformers has one name for scales of tiles and of whole matrices.
            scale = f"{scale}_inv"
        if input_scale not in names and f"{layer}activation_scale" in names:
            input_scale = f"{layer}activation_scale"
        required = (scale, input_scale) if self.has_input_scales else (scale,)
        for each in required:
            if each not in names:
                raise WeightsError(f"the checkpoint lacks {each}, which belongs to {name}")
        used = {name, scale}
        if input_scale in names:
            _check_shape(tensors, input_scale, (1,))
            used.add(input_scale)
        tile = self._tile(tensors, scale, shape)
        matrix = _Matrix(tensors, name, scale, shape, tile, used, self.has_exponents)
        _check_shape(tensors, scale, matrix.num_scales, {_EXPONENTS} if self.has_exponents else FLOATS)
        return matrix

    def _tile(self, tensors: StoredTensors, scale: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        if self.tile is not None:
            return self.tile
        rows, columns = max(1, shape[0]), max(1, shape[1])
        found = tensors.shape(scale)
        return (rows, columns) if found in ((1,), (1, 1)) else (1, columns)


MXFP8 = Float8Scheme("weight_scale", (1, 32), has_input_scales=False, has_exponents=True)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A StoredMatrix of float8 numbers."""

    source: StoredTensors
    name: str
    scale_name: str
    shape: tuple[int, int]
    tile: tuple[int, int]
    tensors: Set[str]
    has_exponents: bool

    @property
    def num_scales(self) -> tuple[int, int]:
        """How many scales there are along the rows and along the columns."""
        return -(-self.shape[0] // self.tile[0]), -(-self.shape[1] // self.tile[1])

    @property
    def storage(self) -> Storage:
        """See StoredMatrix: scales are float32, one for each row where a tile has all columns."""
        if self.tile[1] >= self.shape[1]:
            return FLOAT8_ROWS
        height, width = self.tile
        form = f"float8, a scale for each {height} x {width}"
        return Storage("float8", 1 + 4 / (height * width), form=form, tile=self.tile)

    def read(self, rows: Part, columns: Part, device: torch.device) -> Float8Weight:
        """See StoredMatrix; rows can be cut anywhere, columns between tiles, or inside one that has all."""
        (start, stop), (first, last) = (
            slice_bounds(part, size) for part, size in zip((rows, columns), self.shape, strict=True)
        )
        height, width = self.tile
        if width < self.shape[1] and (first % width or (last % width and last != self.shape[1])):
            raise ConfigError(
                f"{self.name} can only be cut between its scales for {width} columns each, not into columns "
                f"{first} to {last} of {self.shape[1]}; use fewer ranks"
            )
        values = self.source.read_stored(self.name, rows=slice(start, stop), columns=slice(first, last))
        scales = self._read_scales()[start // height : -(-stop // height), first // width : -(-last // width)]
        if width >= self.shape[1] or start % height or (stop % height and stop != self.shape[0]):
            # Each row gets its tile's scale, and only the rows of the part stay.
            scales = scales.repeat_interleave(height, 0)[start % height :][: stop - start]
            height = 1
        return Float8Weight(values, scales.contiguous(), height, min(width, last - first)).to(device)

    def _read_scales(self) -> Tensor:
        scales = self.source.read_stored(self.scale_name).to(torch.float32).reshape(self.num_scales)
        if self.has_exponents:
            # 255 stands for no number, and becomes infinite.
            scales = (scales - 127).exp2()
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise WeightsError(f"{self.scale_name} must hold finite numbers of at least 0")
        return scales


def _check_shape(
    tensors: StoredTensors, name: str, expected: tuple[int, ...], types: Set[str] = FLOATS
) -> None:
    """Check a tensor of scales; dimensions of 1 at the end may be missing."""
    found, kind = tensors.shape(name), tensors.type_name(name)
    if kind not in types:
        raise UnsupportedModelError(f"{name} has the type {kind}; expected {', '.join(sorted(types))}")
    if _trimmed(found) != _trimmed(expected):
        raise WeightsError(f"{name} is {list(found)}, expected {list(expected)}")


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 4 and shape[1::2] == (1, 1):
        shape = shape[::2]
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
