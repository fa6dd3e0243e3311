"""Checkpoints of GPTQ, as AutoGPTQ and GPTQModel write them.

    X.qweight    [K / 8, N] int32      bits 4 i of a word are row 8 r + i
    X.qzeros     [K / group, N / 8]    bits 4 i of a word are column 8 c + i, after 0x11111111 was added to
                                       it, unless checkpoint_format is "gptq_v2"
    X.scales     [K / group, N]        weight = scale * (q - zero)
    X.g_idx      [K] int32             each column's group; may be missing without desc_act

With 8 bits a word holds 4 numbers.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.models.config_fields import ConfigFields, words
from octavo.models.formats.integers.packed_matrix import (
    WORD,
    PackedMatrix,
    check_words,
    groups_of,
    num_groups,
    order_of,
    unpack,
    unpack_columns,
    words_of,
)
from octavo.models.formats.matrix_schemes import MatrixScheme, MixedScheme
from octavo.models.formats.quantised_tensors import FLOATS, check_tensor
from octavo.models.formats.scheme_fields import CALIBRATION, check_patterns, read_group_size
from octavo.models.weights import StoredTensors

_SUFFIX = "qweight"
_KEYS = CALIBRATION | words(
    "bits checkpoint_format desc_act dynamic format group_size is_marlin_format lm_head method",
    "model_file_base_name model_name_or_path modules_to_not_convert mse pack_dtype quant_method",
    "quantizer static_groups sym use_cuda_fp16 use_exllama version",
)
# Bits -> a word of ones.
_ONES = MappingProxyType({4: 0x11111111, 8: 0x01010101})


def read_gptq(fields: ConfigFields) -> "GPTQScheme | MixedScheme":
    """Read quant_method "gptq"; see schemes.read_scheme."""
    fields.require_known(_KEYS)
    fields.require_one_of("method", ("gptq", None))
    fields.require_one_of("data_type", ("int", None))
    fields.require_one_of("pack_dtype", ("int32", None))
    fields.require_one_of("is_marlin_format", (False, None))
    for name in ("checkpoint_format", "format"):
        fields.require_one_of(name, ("gptq", "gptq_v2", None))
    check_patterns(fields, "modules_to_not_convert")
    form = fields.get("checkpoint_format") or fields.get("format")
    if fields.get("format") not in (None, form):
        raise fields.error("format", f"checkpoint_format, {form!r}", fields.get("format"))
    schemes = [_read_numbers(fields, has_lower_zeros=form != "gptq_v2")]
    usual = {name: fields.get(name) for name in ("bits", "desc_act", "group_size", "sym")}
    for pattern, others in fields.mapping("dynamic").items():
        # Layers that a pattern with "-:" matches are not quantised.
        if not pattern.startswith("-:"):
            if not isinstance(others, Mapping):
                raise fields.error(f"dynamic: {pattern}", "an object", others)
            inner = ConfigFields(others, usual, where=f"{fields.where}: dynamic: {pattern}")
            inner.require_known(_KEYS)
            schemes.append(_read_numbers(inner, has_lower_zeros=form != "gptq_v2"))
    if len(schemes) == 1:
        return schemes[0]
    # Tensors do not show whether zeros are alike and columns in order: schemes that need neither come first.
    schemes.sort(key=lambda scheme: (scheme.is_symmetric, not scheme.is_ordered))
    return MixedScheme(schemes)


def _read_numbers(fields: ConfigFields, *, has_lower_zeros: bool) -> "GPTQScheme":
    bits = fields.integer("bits")
    fields.require_one_of("bits", (4, 8))
    return GPTQScheme(
        bits,
        read_group_size(fields),
        is_ordered=fields.boolean("desc_act"),
        is_symmetric=fields.boolean("sym", True),
        has_lower_zeros=has_lower_zeros,
    )


@dataclass(frozen=True, slots=True)
class GPTQScheme(MatrixScheme):
    """A Scheme of packed rows.

    Attributes:
        bits: 4 or 8.
        group_size: columns that share a scale; -1: all.
        is_ordered: columns were quantised by size, so any may be in any group.
        is_symmetric: all zeros are alike.
        has_lower_zeros: 1 was subtracted from every zero within its word, so that a zero of 0 borrowed from
            its neighbour.
    """

    bits: int
    group_size: int
    is_ordered: bool
    is_symmetric: bool
    has_lower_zeros: bool

    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        return name.endswith(f".{_SUFFIX}")

    def fits(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        layer = name.removesuffix(_SUFFIX)
        if not {f"{layer}qzeros", f"{layer}scales"} <= tensors.names() or len(tensors.shape(name)) != 2:
            return False
        num_words, num_rows = tensors.shape(name)
        groups = num_groups(num_words * 32 // self.bits, self.group_size)
        shapes = tensors.shape(f"{layer}scales"), tensors.shape(f"{layer}qzeros")
        return shapes == ((groups, num_rows), (groups, num_rows * self.bits // 32))

    def matrix(self, tensors: StoredTensors, name: str) -> "_Matrix":
        """See MatrixScheme."""
        layer, per_word = name.removesuffix(_SUFFIX), 32 // self.bits
        num_words, num_rows = check_words(tensors, name)
        groups = groups_of(name, num_words * per_word, self.group_size, is_ordered=self.is_ordered)
        if num_rows % per_word:
            raise WeightsError(f"{name} has {num_rows} columns, expected a multiple of {per_word}")
        check_tensor(tensors, f"{layer}qzeros", name, (groups.number, num_rows // per_word), {WORD})
        check_tensor(tensors, f"{layer}scales", name, (groups.number, num_rows), FLOATS)
        if self.is_ordered or f"{layer}g_idx" in tensors.names():
            check_tensor(tensors, f"{layer}g_idx", name, (groups.size,), {WORD, "I64"})
        return _Matrix(tensors, layer, groups, num_rows, self.bits, self.is_symmetric, self.has_lower_zeros)


@dataclass(frozen=True, slots=True)
class _Matrix(PackedMatrix):
    """See above; all tensors but the indices have rows of the weight as columns."""

    has_lower_zeros: bool
    scales_name: ClassVar[str] = "scales"

    @property
    def tensors(self) -> Set[str]:
        names = {f"{self.layer}{part}" for part in (_SUFFIX, "qzeros", "scales")}
        return names | ({f"{self.layer}g_idx"} & self.source.names())

    def quants(self, rows: slice, columns: slice, order: Tensor | None, device: torch.device) -> Tensor:
        words, places = words_of(columns, self.per_word)
        return unpack_columns(self.stored("qweight", words, rows, device).T, places, self.bits, order)

    def scales(self, rows: slice, groups: slice, device: torch.device) -> Tensor:
        return self.stored("scales", groups, rows, device).T

    def zeros(self, rows: slice, groups: slice, device: torch.device) -> Tensor:
        words, places = words_of(rows, self.per_word)
        stored = self.stored("qzeros", groups, words, device)
        if self.has_lower_zeros:
            stored = stored + _ONES[self.bits]
        return unpack(stored, self.bits)[:, places].T

    def order(self, device: torch.device) -> Tensor | None:
        name = f"{self.layer}g_idx"
        if name not in self.source.names():
            return None
        order = order_of(self.source.read_stored(name).to(device), self.groups, name)
        if order is not None and not self.groups.is_ordered:
            raise WeightsError(f"{name} reorders columns, but config.json says desc_act = false")
        return order
