"""Run in a process of its own, with a GPU: transformers pages through Octavo, unpatched."""

# ruff: noqa: E402 - the order of imports is what is tested

import warnings

warnings.simplefilter("ignore")

import octavo.hf

octavo.hf.stand_in_for_flash_attn()

import flash_attn
from _pytest.monkeypatch import MonkeyPatch
from tiny_models import count_calls, greedy, greedy_batch, make_model

calls = count_calls(
    MonkeyPatch(), flash_attn, ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
)
model, _ = make_model("llama")
model.to("cuda")
theirs = greedy(model)
model.set_attn_implementation("flash_attention_2")
assert greedy(model) == theirs
assert greedy_batch(model, max_blocks_per_request=8, use_cuda_graph=False) == theirs
print("paged", calls["flash_attn_with_kvcache"])
assert greedy_batch(model, max_blocks_per_request=8, use_cuda_graph=True) == theirs
octavo.hf.attach(model)
assert greedy(model) == theirs
print("attached", octavo.hf.register())
