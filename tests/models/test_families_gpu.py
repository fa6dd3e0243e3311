"""Families whose norms, factors and routers differ from Llama's, on a GPU against transformers on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoder_harness import hugging_face_greedy, hugging_face_model, quiet_transformers
from test_decoder_families import CASES as DENSE
from test_decoder_families import make_prompts
from test_experts import CASES as MIXTURES

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: case
    for name, case in (DENSE | MIXTURES).items()
    if name.startswith(
        ("olmo3", "exaone4", "granite", "qwen2-moe", "glm4", "minimax", "ernie", "hy-v3", "ministral3")
    )
}


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_generates_what_transformers_does(case: str, tmp_path: Path) -> None:
    class_name, fields = CASES[case]
    if not hasattr(transformers, class_name):
        pytest.skip(f"this transformers has no {class_name}")
    with quiet_transformers():
        model = hugging_face_model(getattr(transformers, class_name)(**fields))
        model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "num_blocks": 64, "block_size": 16}
    llm = LLM(str(tmp_path), device="cuda", dtype="float32", **few)
    prompts = list(make_prompts(fields["vocab_size"]).values())
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == hugging_face_greedy(model, prompt, 6)
    # One sequence takes other kernels.
    alone = llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert alone[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
