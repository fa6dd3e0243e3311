"""The GGUF architectures that Octavo reads: their keys, and their tensors' names on Hugging Face."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from octavo.errors import FileFormatError, UnsupportedModelError, suggest
from octavo.models.config_fields import words
from octavo.models.formats.gguf.tensor_names import (
    EXPERT_NAMES,
    FOUR_NORM_NAMES,
    FUSED_NAMES,
    GEMMA4_NAMES,
    LAYER_NAMES,
    NAMES_WITH_EXPERTS,
    NAMES_WITH_POST_NORM,
    NAMES_WITH_SHARED,
    POST_NORM_NAMES,
)

# Divisors of the rotary frequencies; they become part of the config.
ROPE_FACTORS = "rope_freqs.weight"
# LongRoPE's divisors, for texts beyond the context that a model was first trained on, and within it.
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,4})\.)?((?:nextn\.)?[a-z_]+[12]?)\.(weight|bias|scale)")
_OUTER_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
# Tensors that have no kind at the end of their name on Hugging Face.
_BARE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "mlp.gate.scale",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFExperts:
    """An architecture's mixtures of experts.

    Attributes:
        hf_name: "architectures" of the equivalent config.json; empty: the architecture's.
        config: fields of the config.json that the file lacks.
        chosen_key: its key of the number of experts that a token goes to.
        size_key: its key of the width of an expert.
        scaling_key: its key of the factor of a token's router weights, or None.
        shared_key: its key of the experts that every token goes to, their number or, if it ends in "size",
            their width; None: there are none.
        is_sigmoid: an expert's score is the sigmoid of its logit.
        may_be_dense: layers may have a feed-forward instead; those without a router do.
    """

    hf_name: str = ""
    config: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    chosen_key: str = "num_experts_per_tok"
    size_key: str = "moe_intermediate_size"
    scaling_key: str | None = None
    shared_key: str | None = None
    is_sigmoid: bool = False
    may_be_dense: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFArchitecture:
    """One value of general.architecture.

    Attributes:
        name: that value.
        hf_name: "architectures" of the equivalent config.json.
        interleaves_heads: rows of q and k are stored in pairs (0, D/2), (1, D/2 + 1)...
        tensor_layouts: values of tensor_data_layout that mean the order of rows read here.
        norm_offset: what the converter added to norm weights.
        layer_names: name of a layer's tensor -> its name on Hugging Face.
        own_keys: keys under "<name>." beyond those that every architecture may have.
        sliding_window: window in tokens if the file names none; None: no window.
        yarn: fields of a YaRN scaling that the file lacks.
        has_long_rope: a file may have LongRoPE's factors.
        has_partial_rotary: a file may let rotate only a part of each head.
        wide_layers: number of layers of the one model in this family that scales attention by hidden size /
            heads instead of the head dimension; None: the family's config has no scale.
        has_layers_of_two_kinds: layers with a window and those without one have heads of their own sizes.
        experts: how a file with experts is read; None: it has none.
    """

    name: str
    hf_name: str
    interleaves_heads: bool = False
    tensor_layouts: tuple[str, ...] = ("reference",)
    norm_offset: float = 0.0
    layer_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(LAYER_NAMES))
    own_keys: frozenset[str] = frozenset()
    sliding_window: int | None = None
    yarn: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    has_long_rope: bool = False
    has_partial_rotary: bool = False
    wide_layers: int | None = None
    has_layers_of_two_kinds: bool = False
    experts: GGUFExperts | None = None

    @property
    def rope_tensors(self) -> frozenset[str]:
        """Names of the tensors that become part of the config."""
        return frozenset({LONG_FACTORS, SHORT_FACTORS} if self.has_long_rope else {ROPE_FACTORS})


# The key of an expert's width where it is that of other families' feed-forwards.
_DENSE_SIZE = "intermediate_size"
_WINDOW_KEYS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
# Factors that some architectures have -> their names in a config.json.
MULTIPLIERS: Mapping[str, str] = MappingProxyType(
    {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
)
_EXPERT_KEYS = words(
    "expert_shared_count expert_shared_feed_forward_length expert_weights_scale expert_weights_norm",
    "expert_gating_func expert_group_count expert_group_used_count leading_dense_block_count",
    "interleave_moe_layer_step nextn_predict_layers",
)
# Of Ministral 3: queries grow with their position.
GROWTH_KEY = "attention.temperature_scale"
_GEMMA_KEYS = frozenset({"attention.sliding_window", "final_logit_softcapping"})
_GEMMA_NAMES = MappingProxyType(LAYER_NAMES | FOUR_NORM_NAMES)
_MIXTURE = GGUFArchitecture(name="", hf_name="", layer_names=NAMES_WITH_SHARED, own_keys=_EXPERT_KEYS)
ARCHITECTURES: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        architecture.name: architecture
        for architecture in (
            # Mistral models are converted as llama, and Mixtral models as llama with experts.
            GGUFArchitecture(
                name="llama",
                hf_name="LlamaForCausalLM",
                interleaves_heads=True,
                # An old name of the order of rows that all files of this architecture have.
                tensor_layouts=("reference", "Meta AI original pth"),
                layer_names=NAMES_WITH_EXPERTS,
                experts=GGUFExperts(hf_name="MixtralForCausalLM", size_key=_DENSE_SIZE),
            ),
            # Mistral Small 3; files with attention temperatures are Ministral 3's.
            GGUFArchitecture(
                name="mistral3",
                hf_name="LlamaForCausalLM",
                interleaves_heads=True,
                own_keys=frozenset({GROWTH_KEY, "rope.scaling.yarn_log_multiplier"}),
            ),
            GGUFArchitecture(
                name="qwen3moe",
                hf_name="Qwen3MoeForCausalLM",
                layer_names=NAMES_WITH_EXPERTS,
                experts=GGUFExperts(
                    config=MappingProxyType({"norm_topk_prob": True}),
                    may_be_dense=True,
                ),
            ),
            GGUFArchitecture(
                name="olmoe",
                hf_name="OlmoeForCausalLM",
                layer_names=NAMES_WITH_EXPERTS,
                experts=GGUFExperts(size_key=_DENSE_SIZE),
            ),
            GGUFArchitecture(
                name="gpt-oss",
                hf_name="GptOssForCausalLM",
                layer_names=NAMES_WITH_POST_NORM,
                own_keys=frozenset({"attention.sliding_window"}),
                sliding_window=128,
                # The model was trained with this scaling, unlike others.
                yarn=MappingProxyType({"truncate": False}),
                experts=GGUFExperts(size_key=_DENSE_SIZE),
            ),
            # Phi-4 and Phi-4-mini, too; the converter puts the gate's rows before those of up, as published.
            GGUFArchitecture(
                name="phi3",
                hf_name="Phi3ForCausalLM",
                layer_names=MappingProxyType(LAYER_NAMES | FUSED_NAMES),
                own_keys=frozenset({"attention.sliding_window"}),
                has_long_rope=True,
                has_partial_rotary=True,
            ),
            GGUFArchitecture(name="qwen2", hf_name="Qwen2ForCausalLM"),
            GGUFArchitecture(name="qwen3", hf_name="Qwen3ForCausalLM"),
            # A file does not say which layers do not rotate: every fourth one, as in a config without them.
            GGUFArchitecture(name="smollm3", hf_name="SmolLM3ForCausalLM", interleaves_heads=True),
            # OLMo 3, too, which has windows.
            GGUFArchitecture(
                name="olmo2",
                hf_name="Olmo3ForCausalLM",
                layer_names=POST_NORM_NAMES,
                own_keys=_WINDOW_KEYS,
            ),
            GGUFArchitecture(
                name="exaone4",
                hf_name="Exaone4ForCausalLM",
                layer_names=POST_NORM_NAMES,
                own_keys=_WINDOW_KEYS,
            ),
            GGUFArchitecture(
                name="granite",
                hf_name="GraniteForCausalLM",
                interleaves_heads=True,
                own_keys=frozenset(MULTIPLIERS),
            ),
            replace(
                _MIXTURE,
                name="granitemoe",
                hf_name="GraniteMoeSharedForCausalLM",
                interleaves_heads=True,
                own_keys=frozenset(MULTIPLIERS) | _EXPERT_KEYS,
                experts=GGUFExperts(size_key=_DENSE_SIZE, shared_key="shared_intermediate_size"),
            ),
            replace(
                _MIXTURE,
                name="qwen2moe",
                hf_name="Qwen2MoeForCausalLM",
                experts=GGUFExperts(may_be_dense=True, shared_key="shared_expert_intermediate_size"),
            ),
            replace(
                _MIXTURE,
                name="glm4moe",
                hf_name="Glm4MoeForCausalLM",
                layer_names=NAMES_WITH_POST_NORM,
                has_partial_rotary=True,
                experts=GGUFExperts(
                    scaling_key="routed_scaling_factor", shared_key="n_shared_experts", is_sigmoid=True
                ),
            ),
            replace(
                _MIXTURE,
                name="ernie4_5-moe",
                hf_name="Ernie4_5_MoeForCausalLM",
                experts=GGUFExperts(chosen_key="moe_k", shared_key="moe_num_shared_experts"),
            ),
            replace(
                _MIXTURE,
                name="minimax-m2",
                hf_name="MiniMaxM2ForCausalLM",
                has_partial_rotary=True,
                experts=GGUFExperts(size_key=_DENSE_SIZE, is_sigmoid=True),
            ),
            GGUFArchitecture(
                name="seed_oss",
                hf_name="SeedOssForCausalLM",
                layer_names=NAMES_WITH_POST_NORM,
            ),
            GGUFArchitecture(
                name="gemma2",
                hf_name="Gemma2ForCausalLM",
                norm_offset=1.0,
                layer_names=_GEMMA_NAMES,
                own_keys=_GEMMA_KEYS | {"attn_logit_softcapping"},
                sliding_window=4096,
                wide_layers=46,
            ),
            GGUFArchitecture(
                name="gemma3",
                hf_name="Gemma3ForCausalLM",
                norm_offset=1.0,
                layer_names=_GEMMA_NAMES,
                own_keys=_GEMMA_KEYS | {"attention.sliding_window_pattern", "rope.freq_base_swa"},
                wide_layers=62,
            ),
            GGUFArchitecture(
                name="gemma4",
                hf_name="Gemma4ForCausalLM",
                layer_names=MappingProxyType({**_GEMMA_NAMES, **EXPERT_NAMES, **GEMMA4_NAMES}),
                own_keys=_GEMMA_KEYS
                | words(
                    "attention.sliding_window_pattern attention.key_length_swa attention.value_length_swa",
                    "attention.shared_kv_layers rope.freq_base_swa rope.dimension_count_swa",
                    "embedding_length_per_layer_input",
                ),
                has_layers_of_two_kinds=True,
                experts=GGUFExperts(
                    config=MappingProxyType({"enable_moe_block": True}), chosen_key="top_k_experts"
                ),
            ),
        )
    }
)

# Unsupported architectures that people ask for, and the part that is missing.
_MISSING: Mapping[str, str] = MappingProxyType(
    {
        name: reason
        for reason, names in (
            ("keys that are compressed into one latent row are not supported", "deepseek2 deepseek32"),
            ("their mixtures of experts are not supported", "deepseek dots1 hunyuan-moe llama4"),
            (
                "layers of linear attention, state spaces and convolutions are not supported",
                "falcon-h1 granitehybrid jamba kimi-linear lfm2 lfm2moe mamba mamba2 nemotron_h qwen35 "
                "qwen35moe qwen3next rwkv6 rwkv7",
            ),
            ("factors that grow with depth are not supported", "minicpm"),
            ("several residual streams are not supported", "gemma3n"),
            (
                "norms that subtract the mean are not supported",
                "bloom cohere2 command-r falcon gpt2 gptneox mpt nemotron olmo orion phi2 phimoe stablelm "
                "starcoder2",
            ),
            ("positions of images are not supported", "qwen2vl qwen3vl qwen3vlmoe"),
            ("it holds an encoder of images or sound, a part of another file's model", "clip"),
            (
                "encoders are not supported",
                "bert gemma-embedding jina-bert-v2 modern-bert nomic-bert nomic-bert-moe t5 t5encoder",
            ),
        )
        for name in names.split()
    }
)


def find_architecture(metadata: Mapping[str, object], where: str) -> GGUFArchitecture:
    """Return the architecture that a file's metadata names; `where` is the file's name, for messages.

    Raises:
        FileFormatError: it names none.
        UnsupportedModelError: Octavo does not have it.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FileFormatError(f"{where}: expected general.architecture to be a string, got {name!r}")
    if name not in ARCHITECTURES:
        reason = f": {_MISSING[name]}" if name in _MISSING else suggest(name, ARCHITECTURES)
        raise UnsupportedModelError(
            f"{where}: GGUF architecture {name!r} is not supported{reason}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def hugging_face_name(name: str, architecture: GGUFArchitecture, where: str) -> str:
    """Translate a tensor's name: "blk.0.attn_q.weight" is "model.layers.0.self_attn.q_proj.weight".

    Raises:
        UnsupportedModelError: the architecture has no such tensor.
    """
    parts = _NAME.fullmatch(name)
    if parts is not None:
        layer, stem, kind = parts.groups()
        bare = _BARE_NAMES.get(f"{stem}.{kind}") if architecture.experts else None
        if layer is not None and bare is not None:
            return f"model.layers.{layer}.{bare}"
        if (
            layer is not None
            and kind != "scale"
            and (stem in architecture.layer_names or stem.startswith("nextn."))
        ):
            return f"model.layers.{layer}.{architecture.layer_names.get(stem, stem)}.{kind}"
        if layer is None and stem in _OUTER_NAMES:
            return f"model.{_OUTER_NAMES[stem]}.{kind}"
        if layer is None and stem == "output":
            return f"lm_head.{kind}"
    raise UnsupportedModelError(
        f"{where}: tensor {name!r} has no place in a {architecture.name} model of Octavo; "
        "experts in one tensor each, shared experts and other extensions are not supported"
    )
