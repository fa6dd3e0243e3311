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


def check(what: str, tokens: list[list[int]]) -> None:
    assert tokens == theirs, f"{what}: {tokens} instead of {theirs}"


check("padded", greedy(model))
check("paged", greedy_batch(model, max_blocks_per_request=8, use_cuda_graph=False, use_async_batching=False))
print("paged", calls["flash_attn_with_kvcache"])
# No batch is prepared ahead: transformers then errs now and then, with its own attention, too. See docs/log.
check("graphs", greedy_batch(model, max_blocks_per_request=8, use_cuda_graph=True, use_async_batching=False))
octavo.hf.attach(model)
check("attached", greedy(model))
print("attached", octavo.hf.register())
