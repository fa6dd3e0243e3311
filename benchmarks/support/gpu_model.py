"""A Qwen3 of random weights on an NVIDIA GPU, and one timed run of a workload on it."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams

from .gpu_bound import SHAPES
from .gpu_workloads import Workload


def model_config(size: str) -> dict[str, Any]:
    """Fields of config.json, for a key of SHAPES."""
    hidden, layers, heads, inner = SHAPES[size]
    return dict(  # noqa: C408
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128, num_key_value_heads=8,
        hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000, max_position_embeddings=40960,
        attention_bias=False, vocab_size=151936, eos_token_id=151645, torch_dtype="bfloat16",
        tie_word_embeddings=size == "0.6b", hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
    )  # fmt: skip


def load(
    size: str,
    kv_cache_dtype: str = "auto",
    share_prefixes: bool = True,
    *,
    deterministic: bool = False,
    memory_fraction: float | None = None,
) -> LLM:
    """Build the model with random weights; options are those of EngineConfig."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(model_config(size)))
    return LLM(
        str(folder),
        load_format="dummy",
        max_model_len=16384,
        kv_cache_dtype=kv_cache_dtype,
        share_prefixes=share_prefixes,
        deterministic=deterministic,
        memory_fraction=memory_fraction,
    )


def run(llm: LLM, workload: Workload) -> float:
    """Seconds that all requests take, starting with an empty prefix cache."""
    llm.reset_prefix_cache()
    params = [
        SamplingParams(n=workload.n, temperature=0.6, max_tokens=num, ignore_eos=True, detokenize=False)
        for num in workload.max_tokens
    ]
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params)
    seconds = time.perf_counter() - start
    for output, num in zip(outputs, workload.max_tokens, strict=True):
        assert [len(completion.token_ids) for completion in output.outputs] == [num] * workload.n
    return seconds
