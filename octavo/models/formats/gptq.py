"""Checkpoints of GPTQ, as AutoGPTQ and GPTQModel write them.

    X.qweight    [K / 8, N] int32      bits 4 i of a word are row 8 r + i
    X.qzeros     [K / group, N / 8]    bits 4 i of a word are column 8 c + i; one less than the zero, but for
                                       checkpoint_format "gptq_v2"
    X.scales     [K / group, N]        weight = scale * (q - zero)
    X.g_idx      [K] int32             each column's group; may be missing without desc_act

With 8 bits a word holds 4 numbers.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError, WeightsError, refuse_unknown
from octavo.layers.linear.block_weight import BlockWeight
from octavo.layers.linear.quantised import Storage
from octavo.models.config_fields import ConfigFields
from octavo.models.formats.awq import read_group_size
from octavo.models.formats.float8_config import check_patterns, refuse_other_values
from octavo.models.formats.integers import (
    FLOATS,
    WORD,
    Groups,
    check_tensor,
    check_words,
    groups_of,
    make_blocks,
    open_matrices,
    order_of,
    refuse_both,
    storage_of,
    unpack,
    unpack_rows,
    words_of,
)
from octavo.models.formats.quantised_tensors import QuantisedTensors, StoredTensors
from octavo.models.weights import Part, slice_bounds

_WORD_BITS = 32
_KEYS = frozenset(
    {
        *(
            "backend",
            "batch_size",
            "bits",
            "block_name_to_quantize",
            "cache_block_outputs",
            "checkpoint_format",
        ),
        *(
            "damp_auto_increment",
            "damp_percent",
            "dataset",
            "desc_act",
            "dynamic",
            "exllama_config",
            "format",
        ),
        *("group_size", "is_marlin_format", "lm_head", "max_input_length", "meta", "model_file_base_name"),
        *(
            "model_name_or_path",
            "model_seqlen",
            "module_name_preceding_first_block",
            "modules_to_not_convert",
        ),
        *("modules_in_block_to_quantize", "mse", "pack_dtype", "pad_token_id", "quant_method", "quantizer"),
        *("static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "version"),
    }
)


def read_gptq(fields: ConfigFields) -> "GPTQScheme":
    """Read quant_method "gptq"; see schemes.read_scheme."""
    refuse_unknown(UnsupportedModelError, f"{fields.where}: unknown field", fields.names(), _KEYS)
    bits = fields.integer("bits")
    refuse_other_values(fields, "bits", (4, 8))
    refuse_other_values(fields, "pack_dtype", ("int32", None))
    refuse_other_values(fields, "is_marlin_format", (False, None))
    for name in ("checkpoint_format", "format"):
        refuse_other_values(fields, name, ("gptq", "gptq_v2", None))
    if fields.mapping("dynamic"):
        raise UnsupportedModelError(f"{fields.where}: dynamic = {fields.get('dynamic')!r} is not supported")
    check_patterns(fields, "modules_to_not_convert")
    form = fields.get("checkpoint_format") or fields.get("format")
    return GPTQScheme(
        bits,
        read_group_size(fields),
        is_ordered=fields.boolean("desc_act"),
        is_symmetric=fields.boolean("sym", True),
        zero_offset=0 if form == "gptq_v2" else 1,
    )


@dataclass(frozen=True, slots=True)
class GPTQScheme:
    """A Scheme of packed rows.

    Attributes:
        bits: 4 or 8.
        group_size: columns that share a scale; -1: all.
        is_ordered: columns were quantised by size, so any may be in any group.
        is_symmetric: all zeros are alike.
        zero_offset: zero less the number that is stored for it.
    """

    bits: int
    group_size: int
    is_ordered: bool
    is_symmetric: bool
    zero_offset: int

    def open(self, tensors: StoredTensors) -> QuantisedTensors:
        """See Scheme."""
        return open_matrices(tensors, "qweight", self._matrix)

    def _matrix(self, tensors: StoredTensors, layer: str) -> "_Matrix":
        name, per_word = f"{layer}qweight", _WORD_BITS // self.bits
        num_words, num_rows = check_words(tensors, name)
        groups = groups_of(name, num_words * per_word, self.group_size, is_ordered=self.is_ordered)
        if num_rows % per_word:
            raise WeightsError(f"{name} has {num_rows} columns, expected a multiple of {per_word}")
        check_tensor(tensors, f"{layer}qzeros", name, (groups.number, num_rows // per_word), {WORD})
        check_tensor(tensors, f"{layer}scales", name, (groups.number, num_rows), FLOATS)
        if self.is_ordered or f"{layer}g_idx" in tensors.names():
            check_tensor(tensors, f"{layer}g_idx", name, (groups.size,), {WORD, "I64"})
        refuse_both(tensors, name, layer)
        return _Matrix(tensors, layer, groups, num_rows, self)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A StoredMatrix."""

    source: StoredTensors
    layer: str
    groups: Groups
    num_rows: int
    scheme: GPTQScheme

    @property
    def shape(self) -> tuple[int, int]:
        """See StoredMatrix."""
        return self.num_rows, self.groups.size

    @property
    def storage(self) -> Storage:
        """See StoredMatrix."""
        return storage_of(
            self.scheme.bits,
            self.groups,
            self.num_rows,
            is_symmetric=self.scheme.is_symmetric,
            scale_type=self.source.type_name(f"{self.layer}scales"),
        )

    @property
    def tensors(self) -> Set[str]:
        """See StoredMatrix."""
        names = {f"{self.layer}{part}" for part in ("qweight", "qzeros", "scales")}
        return names | ({f"{self.layer}g_idx"} & self.source.names())

    def read(self, rows: Part, columns: Part, device: torch.device) -> BlockWeight:
        """See StoredMatrix."""
        bits, per_word = self.scheme.bits, _WORD_BITS // self.scheme.bits
        order = self._order(device)
        columns, groups = self.groups.cut(columns)
        rows = slice(*slice_bounds(rows, self.num_rows))
        words, places = words_of(columns, per_word)
        stored = self.source.read_stored(f"{self.layer}qweight", rows=words, columns=rows).to(device)

        def unpacked(part: slice) -> Tensor:
            numbers = unpack(stored[:, part].T, bits)
            return numbers[:, places] if order is None else numbers.index_select(1, order)

        scales = self.source.read_stored(f"{self.layer}scales", rows=groups, columns=rows).to(device)
        return make_blocks(
            unpack_rows(rows.stop - rows.start, columns.stop - columns.start, device, unpacked),
            scales.T,
            self._zeros(groups, rows, device).T,
            bits,
            order,
            f"{self.layer}scales",
        )

    def _order(self, device: torch.device) -> Tensor | None:
        name = f"{self.layer}g_idx"
        if name not in self.source.names():
            return None
        order = order_of(self.source.read_stored(name).to(device), self.groups, name)
        if order is not None and not self.groups.is_ordered:
            raise WeightsError(f"{name} reorders columns, but config.json says desc_act = false")
        return order

    def _zeros(self, groups: slice, rows: slice, device: torch.device) -> Tensor:
        """Read zeros, [groups, rows] uint8."""
        bits, per_word = self.scheme.bits, _WORD_BITS // self.scheme.bits
        words, places = words_of(rows, per_word)
        stored = self.source.read_stored(f"{self.layer}qzeros", rows=groups, columns=words).to(device)
        zeros = unpack(stored, bits)[:, places]
        # What was below 0 is the largest number.
        return zeros + self.scheme.zero_offset & (1 << bits) - 1
