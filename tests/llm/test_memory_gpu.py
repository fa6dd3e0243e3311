"""What the memory plan predicts is what a run takes."""

import json
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.memory.working import GRAPH_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 50000,
    "hidden_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_run_takes_what_the_plan_says(tmp_path: Path, share_prefixes: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    llm = LLM(
        str(tmp_path), load_format="dummy", num_blocks=600, max_num_seqs=256, share_prefixes=share_prefixes
    )
    prompts = [[(i * 7 + j) % 1000 for j in range(64 + 30 * (i % 8))] for i in range(200)]
    llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False))
    taken = torch.cuda.max_memory_reserved() - before
    predicted = llm.engine.plan.total_bytes
    # Graphs are the driver's, which PyTorch does not count.
    message = f"{predicted / 2**20:.0f} MiB, {taken / 2**20:.0f} taken"
    assert predicted - GRAPH_BYTES <= 1.05 * taken, message
    assert taken <= predicted, message
