"""Folders with the config.json of a model of random weights, which every engine can read. Needs no torch.

With `write_tokenizer` a server can turn its random tokens into text, too.
"""

import atexit
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from .gpu_bound import (
    BESIDE,
    EXPERTS,
    GEMMA_WINDOW,
    GLOBAL_KV_HEADS,
    KV_HEADS,
    SHAPES,
    WINDOW,
    head_dim,
    is_gemma,
    is_gpt_oss,
    vocabulary,
)

# For tests of the scripts, on a CPU.
_TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 16384,
    "attention_bias": False, "vocab_size": 16384, "eos_token_id": 0, "torch_dtype": "float32",
    "tie_word_embeddings": True, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip


_NOT_CONVERTED = [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
]  # fmt: skip


def model_config(size: str) -> dict[str, Any]:
    """Fields of config.json, for a key of SHAPES or "tiny"."""
    if size == "tiny":
        return _TINY
    if is_gpt_oss(size):
        return _gpt_oss_config(size)
    if is_gemma(size):
        return _gemma_config(size)
    hidden, layers, heads, inner = SHAPES[size]
    fields = dict(  # noqa: C408
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128,
        num_key_value_heads=KV_HEADS[size],
        hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000, max_position_embeddings=40960,
        attention_bias=False, vocab_size=151936, eos_token_id=151645, torch_dtype="bfloat16",
        use_sliding_window=False, sliding_window=None, tie_word_embeddings=size == "0.6b", hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
    )  # fmt: skip
    if size not in EXPERTS:
        return fields
    number, chosen = EXPERTS[size]
    return fields | dict(  # noqa: C408
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=number,
        num_experts_per_tok=chosen, moe_intermediate_size=inner, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[],
    )  # fmt: skip


def _gpt_oss_config(size: str) -> dict[str, Any]:
    """As published, experts in MXFP4."""
    hidden, layers, heads, inner = SHAPES[size]
    number, chosen = EXPERTS[size]
    return dict(  # noqa: C408
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", head_dim=head_dim(size),
        num_key_value_heads=KV_HEADS[size], hidden_act="silu", rms_norm_eps=1e-5, rope_theta=150000,
        rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        max_position_embeddings=131072, attention_bias=True, swiglu_limit=7.0, vocab_size=vocabulary(size),
        eos_token_id=200002, torch_dtype="bfloat16", sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2), tie_word_embeddings=False,
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
        num_local_experts=number, num_experts_per_tok=chosen,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": _NOT_CONVERTED},
    )  # fmt: skip


def _gemma_config(size: str) -> dict[str, Any]:
    """Gemma 4's text model, without layer inputs."""
    hidden, layers, heads, inner = SHAPES[size]
    fields = dict(  # noqa: C408
        architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", head_dim=256, global_head_dim=512,
        num_attention_heads=heads, num_key_value_heads=KV_HEADS[size],
        num_global_key_value_heads=GLOBAL_KV_HEADS[size], attention_k_eq_v=True, hidden_size=hidden,
        num_hidden_layers=layers, intermediate_size=BESIDE.get(size, inner), vocab_size=vocabulary(size),
        hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, max_position_embeddings=131072,
        sliding_window=GEMMA_WINDOW, layer_types=[*["sliding_attention"] * 5, "full_attention"] * (layers // 6),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25,
            },
        },
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=vocabulary(size), num_kv_shared_layers=0,
        final_logit_softcapping=30.0, tie_word_embeddings=True, attention_bias=False, eos_token_id=1,
        torch_dtype="bfloat16",
    )  # fmt: skip
    if size not in EXPERTS:
        return fields
    number, chosen = EXPERTS[size]
    return fields | dict(  # noqa: C408
        enable_moe_block=True, num_experts=number, top_k_experts=chosen, moe_intermediate_size=inner,
    )  # fmt: skip


def model_folder(size: str, **fields: Any) -> str:
    """Make a folder that holds nothing but config.json, with more fields perhaps; returns its path.

    It is removed when this process ends. One that ends by os._exit calls remove_folder before.
    """
    folder = Path(tempfile.mkdtemp(prefix="octavo-bench-"))
    atexit.register(_remove_in, os.getpid(), folder)
    (folder / "config.json").write_text(json.dumps(model_config(size) | fields))
    return str(folder)


def remove_folder(folder: str) -> None:
    """Remove a folder that model_folder made, if it is still there."""
    shutil.rmtree(folder, ignore_errors=True)


def _remove_in(process: int, folder: Path) -> None:
    """Remove a folder in the process that made it: a forked one may end while others still read it."""
    if os.getpid() == process:
        remove_folder(str(folder))


def write_tokenizer(folder: Path) -> None:
    """Add a byte-level tokenizer without merges that has a text for every id of the folder's config.json."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (" " + "".join(word) for word in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4))
    # A space is written as this letter.
    pieces = itertools.chain(letters, (word.replace(" ", "\u0120") for word in words))
    vocab = {piece: number for number, piece in enumerate(itertools.islice(pieces, vocab_size))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
