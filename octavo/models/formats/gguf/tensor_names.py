"""Names of the tensors of layers in GGUF files, and on Hugging Face."""

from types import MappingProxyType

# It stands for ".experts.<number>." in the name of a tensor that stacks a projection of all experts.
EXPERTS = ".experts.*."

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp{EXPERTS}gate_proj",
    "ffn_up_exps": f"mlp{EXPERTS}up_proj",
    "ffn_down_exps": f"mlp{EXPERTS}down_proj",
}
SHARED_NAMES = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
GEMMA4_NAMES = {
    "ffn_gate_up_exps": f"mlp{EXPERTS}gate_up_proj",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
# With norms before and after each block, the norm before the feed-forward has another name.
FOUR_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NAMES_WITH_EXPERTS = MappingProxyType(LAYER_NAMES | EXPERT_NAMES)
NAMES_WITH_SHARED = MappingProxyType(NAMES_WITH_EXPERTS | SHARED_NAMES)
NAMES_WITH_POST_NORM = MappingProxyType(
    {name: own for name, own in NAMES_WITH_SHARED.items() if name != "ffn_norm"}
    | {"post_attention_norm": "post_attention_layernorm"}
)
FUSED_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
POST_NORM_NAMES = MappingProxyType(
    {name: own for name, own in LAYER_NAMES.items() if name not in ("attn_norm", "ffn_norm")}
    | {name: own for name, own in FOUR_NORM_NAMES.items() if name != "ffn_norm"}
)
