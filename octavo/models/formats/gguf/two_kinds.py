"""What a GGUF file says of layers of two kinds, with a window and without one: Gemma 4's."""

from collections.abc import Mapping

from octavo.errors import UnsupportedModelError
from octavo.models.formats.gguf.fields import ArchitectureFields

_EMBEDDING = "per_layer_token_embd.weight"


def two_kinds(fields: ArchitectureFields, config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a config.json that only Gemma 4 has, and those that it has for each kind of layer.

    Args:
        fields: the file's.
        config: what the file says of all layers, or of those without a window.

    Raises:
        FileFormatError: a key is missing or malformed.
        UnsupportedModelError: it asks for a network that no Gemma 4 has.
    """
    kinds, tensors = config.get("layer_types"), fields.file.tensors
    if not isinstance(kinds, list):
        value = fields.get("attention.sliding_window_pattern")
        raise fields.error("attention.sliding_window_pattern", "true or false for each layer", value)
    head_dim = fields.integer("attention.key_length_swa")
    neutral = ("attention.value_length_swa", "rope.dimension_count_swa")
    fields.require_neutral(dict.fromkeys(neutral, (head_dim,)))
    num_shared = fields.integer("attention.shared_kv_layers", 0, minimum=0, maximum=len(kinds) - 1)
    own = [index for index, kind in enumerate(kinds[: len(kinds) - num_shared]) if kind == "full_attention"]
    heads = fields.per_layer("attention.head_count_kv", fields.integer("attention.head_count"), len(kinds))
    dims = [head_dim if kind == "sliding_attention" else config["head_dim"] for kind in kinds]
    layers = enumerate(zip(dims, heads, strict=True))
    return {
        "head_dim": head_dim,
        "per_layer_config": {str(i): {"head_dim": d, "num_key_value_heads": n} for i, (d, n) in layers},
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in tensors for index in own),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": _is_double(fields, len(kinds), num_shared),
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": tensors[_EMBEDDING].shape[0] if _EMBEDDING in tensors else None,
        "rope_scaling": None,
        # The tensor of factors is of layers without a window.
        "rope_parameters": {"full_attention": config["rope_scaling"] or {}, "sliding_attention": {}},
    }


def _is_double(fields: ArchitectureFields, num_layers: int, num_shared: int) -> bool:
    """Return whether the layers that read another layer's keys have feed-forwards of twice the width."""
    widths = fields.per_layer("feed_forward_length", None, num_layers)
    is_double = widths[-1] != widths[0]
    if widths != [widths[0]] * (num_layers - num_shared) + [widths[0] * (1 + is_double)] * num_shared:
        raise UnsupportedModelError(f"{fields.where}: feed_forward_length = {widths} is not supported")
    return is_double
