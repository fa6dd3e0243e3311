"""What weights take in memory, by the parts of a network and the forms that they have."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from octavo.forms.base import Storage
from octavo.gemm.cpu import int8
from octavo.gemm.cpu import mkl as packed
from octavo.models import ModelConfig, parameter_shapes


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of one part of the network that have one form.

    Attributes:
        part: "embedding", "attention", "feed-forward", "experts", "LM head", or "norms and others".
        form: as the checkpoint calls it, "Q4_K" or "4 bits in groups of 128", or a dtype.
        kind: that of QuantisedWeight; None: numbers of a dtype.
        num_bytes: what they take.
    """

    part: str
    form: str
    kind: str | None
    num_bytes: float


def weight_groups(
    model: ModelConfig,
    dtype: torch.dtype,
    kept: Mapping[str, Storage],
    quantization: str,
    device: torch.device,
) -> tuple[WeightGroup, ...]:
    """Return the weights of a rank's share, in the order in which they are loaded.

    Args:
        model: the rank's share of a network.
        dtype: of weights that are not quantised.
        kept: matrices that stay quantised; see kept_storage.
        quantization: see ExecutionPlan.
        device: of the weights.
    """
    plain = Storage("plain", dtype.itemsize, form=str(dtype).removeprefix("torch."))
    shapes, rounded = parameter_shapes(model), _ROUNDED.get(quantization)
    totals: dict[tuple[str, str, str | None], float] = {}
    for name, shape in shapes.items():
        storage = kept.get(name, plain)
        if name not in kept and rounded is not None and _is_rounded(quantization, name, shape):
            storage = rounded
        key = _part_of(name), storage.form, None if storage is plain else storage.kind
        totals[key] = totals.get(key, 0.0) + storage.nbytes(shape)
    if "lm_head.weight" not in shapes and _EMBEDDING not in kept:
        copy = None
        if rounded is _INT8:
            copy = _INT8
        elif rounded is None and _is_packed(dtype, device):
            copy = plain
        if copy is not None:
            key = "LM head", f"{copy.form}, a copy of the embedding", None if copy is plain else copy.kind
            totals[key] = copy.nbytes(shapes[_EMBEDDING])
    return tuple(WeightGroup(*key, num_bytes) for key, num_bytes in totals.items())


def dequantised_forms(stored: Mapping[str, Storage], kept: Mapping[str, Storage]) -> dict[str, int]:
    """Return how many matrices of each form become numbers of dtype while loading.

    Args:
        stored: matrices that the checkpoint stores quantised.
        kept: those that stay so.
    """
    forms: dict[str, int] = {}
    for name, storage in stored.items():
        if name not in kept:
            forms[storage.form] = forms.get(storage.form, 0) + 1
    return forms


_EMBEDDING = "model.embed_tokens.weight"
_INT8 = Storage("int8", int8.BYTES_PER_NUMBER, form="int8")
_BF16 = Storage("bf16", 2, form="bfloat16")
# Quantization -> each matrix that it rounds.
_ROUNDED: Mapping[str, Storage] = MappingProxyType(
    {"bf16": _BF16, "mixed": _BF16, "mixed fp8": _BF16, "int8": _INT8}
)


def _is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrices of a dtype are copied to a layout of MKL's, at times with more bytes."""
    return device.type == "cpu" and packed.unsupported_reason(torch.empty(0, dtype=dtype)) is None


def _is_rounded(quantization: str, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is the weight of a GEMM, or an embedding that may be an LM head, too."""
    if len(shape) != 2 or name.endswith("mlp.gate.weight"):
        return False
    return quantization != "int8" or name != _EMBEDDING


def _part_of(name: str) -> str:
    if name == _EMBEDDING:
        return "embedding"
    if name == "lm_head.weight":
        return "LM head"
    if not name.endswith("_proj.weight"):
        return "norms and others"
    if ".experts." in name:
        return "experts"
    return "attention" if ".self_attn." in name else "feed-forward"
