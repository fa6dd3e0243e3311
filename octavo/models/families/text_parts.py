"""Text models inside checkpoints that also read images or sound: their families, fields and tensors.

here             model.layers.0.mlp.up_proj.weight                  lm_head.weight
transformers 5   model.language_model.layers.0.mlp.up_proj.weight   lm_head.weight
older            language_model.model.layers.0.mlp.up_proj.weight   language_model.lm_head.weight
without a head   language_model.layers.0.mlp.up_proj.weight, or layers.0.mlp.up_proj.weight
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from octavo.errors import UnsupportedModelError

_TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")
_BARE = ("embed_tokens.", "layers.", "norm.", "embed_tokens_per_layer.", "per_layer_")
# What encodes images and sound; it is not read.
_UNREAD = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|image_newline|embed_vision"
    r"|vision_embedder|audio_tower|embed_audio)\b.*"
)
# The whole checkpoint's fields come before the text model's, where both have them.
_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
TIES = "tie_word_embeddings"


_LLAVA = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_MISTRAL3 = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
# Architecture of a whole checkpoint -> model_type of its text_config -> architecture of that one's family.
TEXT_PARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
        "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
        "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
        "LlavaForConditionalGeneration": _LLAVA,
        "Mistral3ForConditionalGeneration": _MISTRAL3,
        "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "Qwen2ForCausalLM"},
        "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
        "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
        "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
    }
)
# What these text models do where config.json is silent, unlike their families.
PART_DEFAULTS = {"Qwen3VLMoeForConditionalGeneration": {"norm_topk_prob": True}}


def family_name(architecture: str, config: Mapping[str, object]) -> str:
    """Return the architecture of the family of a text model.

    Args:
        architecture: of the whole checkpoint, one of TEXT_PARTS.
        config: its config.json.

    Raises:
        UnsupportedModelError: its text model is of another family.
    """
    families = TEXT_PARTS[architecture]
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else text
    if text is None:
        # Older files have all fields side by side.
        kind = next(iter(families))
    if not isinstance(kind, str) or kind not in families:
        raise UnsupportedModelError(
            f"config.json: text_config of {architecture} has the model_type {kind!r}, which is not "
            f"supported; supported: {', '.join(families)}"
        )
    return families[kind]


def text_fields(config: Mapping[str, object], model_type: str) -> Mapping[str, object]:
    """Return the fields of the text model, which may be one level down.

    Args:
        config: the whole config.json.
        model_type: of text models alone that may be one level down.

    Raises:
        UnsupportedModelError: something else is there.
    """
    text, is_part = config.get("text_config"), find_text_part(config) is not None
    if text is None:
        return _without_places(config) if is_part else config
    if not isinstance(text, Mapping) or not (is_part or text.get("model_type") == model_type):
        raise UnsupportedModelError(f"config.json: text_config is supported for model_type {model_type} only")
    if not is_part:
        return {**config, **text}
    outer = {name: config[name] for name in _OUTER if config.get(name) is not None}
    return _without_places({**config, **text, **outer})


def _without_places(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Leave out how positions in images rotate: the three positions of a text's token are the same."""
    found = dict(fields)
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, Mapping):
            kept = {key: value for key, value in rope.items() if not str(key).startswith("mrope_")}
            found[name] = {key: "default" if value == "mrope" else value for key, value in kept.items()}
    return found


def find_text_part(config: Mapping[str, object]) -> str | None:
    """Return the architecture of a config.json whose text model alone is read; None: of others."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name in TEXT_PARTS else None


def own_name(name: str) -> str | None:
    """Return our name of a checkpoint's tensor; None: the text model does not need it."""
    if _UNREAD.fullmatch(name):
        return None
    match = _TEXT.fullmatch(name)
    name = name if match is None else match[1]
    return f"model.{name}" if name.startswith(_BARE) else name
