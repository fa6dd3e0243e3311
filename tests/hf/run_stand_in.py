"""Run in a process of its own: transformers' flash_attention_2 on Octavo's modules, on a CPU.

transformers looks for flash_attn where there is a GPU only, and reads pages in place there only: both checks
are answered for it, and for the model's device. All that follows is transformers' own code.
"""

# ruff: noqa: E402 - the order of imports is what is tested

import warnings

warnings.simplefilter("ignore")

import octavo.hf

octavo.hf.stand_in_for_flash_attn()
octavo.hf.stand_in_for_flash_attn()  # changes nothing

import flash_attn
import torch
from _pytest.monkeypatch import MonkeyPatch
from flash_attn.bert_padding import pad_input, unpad_input  # noqa: F401
from flash_attn.flash_attn_interface import flash_attn_varlen_func  # noqa: F401
from flash_attn.layers.rotary import apply_rotary_emb  # noqa: F401

patch = MonkeyPatch()
with patch.context() as gpu:
    gpu.setattr(torch.cuda, "is_available", lambda: True)
    from transformers.utils import import_utils

    assert import_utils.is_flash_attn_2_available()
    assert not import_utils.is_flash_attn_3_available()
    import_utils.is_torch_cuda_available.cache_clear()
    from transformers import modeling_flash_attention_utils  # noqa: F401

from tiny_models import count_calls, greedy, greedy_batch, greedy_one_by_one, make_model
from transformers.generation.continuous_batching import initialization

calls = count_calls(
    patch, flash_attn, ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
)
model, _ = make_model("llama")
theirs = greedy(model)
patch.setattr(type(model), "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
model.set_attn_implementation("flash_attention_2")
assert greedy(model) == theirs
print("padded", calls["flash_attn_varlen_func"])

patch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
assert greedy_batch(model, max_blocks_per_request=8, block_size=4) == theirs
print("paged", calls["flash_attn_with_kvcache"])
assert greedy_one_by_one(model, max_blocks_per_request=8, block_size=4) == theirs
