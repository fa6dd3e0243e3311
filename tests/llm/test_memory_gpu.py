"""What the memory plan predicts is what a run takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


# A process of its own: memory that others keep would count.
RUN = """
import json, sys
import torch
from octavo import LLM, SamplingParams

shares = sys.argv[2] == "True"
llm = LLM(sys.argv[1], load_format="dummy", num_blocks=600, max_num_seqs=256, share_prefixes=shares)
prompts = [[(i * 7 + j) % 1000 for j in range(64 + 30 * (i % 8))] for i in range(200)]
llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False))
print(json.dumps([llm.engine.plan.total_bytes, torch.cuda.max_memory_reserved()]))
"""


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_run_takes_what_the_plan_says(tmp_path: Path, share_prefixes: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", RUN, str(tmp_path), str(share_prefixes)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    predicted, taken = json.loads(done.stdout.splitlines()[-1])
    # Graphs are the driver's, which PyTorch does not count.
    message = f"{predicted / 2**20:.0f} MiB, {taken / 2**20:.0f} taken"
    assert predicted - GRAPH_BYTES <= 1.05 * taken, message
    assert taken <= predicted, message
