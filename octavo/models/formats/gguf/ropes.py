"""The rotary settings of a GGUF file, in the terms of a config.json."""

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.models.formats.gguf.architectures import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from octavo.models.formats.gguf.fields import ArchitectureFields


def read_rotary_dim(fields: ArchitectureFields, head_dim: int) -> int:
    """Return how many dimensions of a head turn, the first ones.

    Raises:
        UnsupportedModelError: not all, in an architecture where all do.
        FileFormatError: more than a head has.
    """
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not fields.architecture.has_partial_rotary:
        raise UnsupportedModelError(
            f"{fields.where}: rope.dimension_count = {rotary_dim} differs from the head dimension "
            f"{head_dim}; partial rotary embeddings are not supported for this architecture"
        )
    if rotary_dim > head_dim:
        raise fields.error("rope.dimension_count", f"at most the head dimension {head_dim}", rotary_dim)
    return rotary_dim


def read_rope_scaling(fields: ArchitectureFields, rotary_dim: int) -> dict[str, object] | None:
    """Return rope_scaling, or None where frequencies are as trained.

    Raises:
        UnsupportedModelError: it is of a kind that Octavo does not have, or of two kinds.
        FileFormatError: a value or a tensor is missing or malformed.
    """
    tensors = fields.file.tensors
    if fields.architecture.has_long_rope and (LONG_FACTORS in tensors or SHORT_FACTORS in tensors):
        return _long_rope(fields, rotary_dim)
    fields.require_neutral({"rope.scaling.attn_factor": (1,)})
    has_factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear")
    kind = fields.get("rope.scaling.type", "linear" if has_factor else "none")
    if ROPE_FACTORS in tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{fields.where}: {ROPE_FACTORS} together with rope scaling {kind!r}")
        return {"rope_type": "factors", "factors": _factors(fields, ROPE_FACTORS, rotary_dim)}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        needed = f" without {LONG_FACTORS}" if fields.architecture.has_long_rope else ""
        raise UnsupportedModelError(
            f"{fields.where}: rope.scaling.type {kind!r} is not supported{needed}; "
            "supported: none, linear, yarn"
        )
    if kind == "linear" and fields.get("rope.scaling.factor") is None:
        return {"rope_type": kind, "factor": fields.number("rope.scale_linear")}
    scaling: dict[str, object] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": _original_context(fields), **fields.architecture.yarn}
    return scaling


def _long_rope(fields: ArchitectureFields, rotary_dim: int) -> dict[str, object]:
    """Return LongRoPE's factors; nothing else may stretch beside them."""
    fields.require_neutral(
        {
            "rope.scaling.type": ("longrope", "none"),
            "rope.scaling.factor": (0, 1),
            "rope.scale_linear": (0, 1),
        }
    )
    return {
        "rope_type": "longrope",
        "long_factor": _factors(fields, LONG_FACTORS, rotary_dim),
        "short_factor": _factors(fields, SHORT_FACTORS, rotary_dim),
        "original_max_position_embeddings": _original_context(fields),
        "attention_factor": fields.number("rope.scaling.attn_factor"),
    }


def _original_context(fields: ArchitectureFields) -> int:
    return fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))


def _factors(fields: ArchitectureFields, name: str, rotary_dim: int) -> list[float]:
    file = fields.file
    info = file.tensors.get(name)
    if info is None or info.type.name != "F32" or info.shape != (rotary_dim // 2,):
        found = "none" if info is None else f"{info.type.name} of {list(info.shape)}"
        raise FileFormatError(
            f"{file.path.name}: expected a tensor {name}, F32 of [{rotary_dim // 2}], got {found}"
        )
    factors = file.raw(name).view("<f4").tolist()
    file.close()
    return factors
