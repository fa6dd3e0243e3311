"""Mixtures of experts over two ranks, each with a part of every expert, give the tokens of one."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpt_oss_checkpoints import TINY as GPT_OSS
from gpt_oss_checkpoints import make_tensors, write_folder
from ranks_helpers import OPTIONS

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.parallel import connect_gloo

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"num_experts": 6, "moe_intermediate_size": 10, "mlp_only_layers": [0]},
    # One key head, which both ranks hold.
    "OlmoeForCausalLM": {"num_experts": 6, "num_key_value_heads": 1},
    # What every token goes to is cut too, in a width of its own and with a gate that both ranks compute.
    "Qwen2MoeForCausalLM": {
        "num_experts": 6,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 14,
    },
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 10,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "head_dim": 8,
    },
    # Experts beside a feed-forward, and heads of two sizes.
    "Gemma4ForCausalLM": {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 10,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 0,
    },
}
UNEVEN = {"num_local_experts": 6, "intermediate_size": 47}
PROMPTS = [[3, 1, 4], [5, 8], list(range(3, 40))]


def make_llm(folder: Path, family: str, **options: Any) -> LLM:
    fields = TINY | FAMILIES.get(family, UNEVEN) | {"architectures": [family]}
    (folder / "config.json").write_text(json.dumps(fields))
    return LLM(str(folder), **OPTIONS | options)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    check_ranks(make_llm(tmp_path, family), tmp_path)


def check_ranks(one: LLM, folder: Path) -> None:
    """Compare an engine with two ranks of the same config."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)

    def run(rank: int) -> list[RequestOutput]:
        """As one of two ranks, each of which is a thread."""
        parallel = connect_gloo(rank, 2, folder / "rendezvous")
        return LLM.from_engine(Engine(one.engine.config, parallel=parallel)).generate(PROMPTS, params)

    with ThreadPoolExecutor(2) as threads:
        ranks = [*threads.map(run, range(2))]
    expected, found, other = (
        [output.outputs[0] for output in outputs] for outputs in (one.generate(PROMPTS, params), *ranks)
    )
    assert [c.token_ids for c in other] == [c.token_ids for c in found] == [c.token_ids for c in expected]
    for one, two in zip(expected, found, strict=True):
        for before, after in zip(one.logprobs or [], two.logprobs or [], strict=True):
            assert {t: v.logprob for t, v in after.items()} == pytest.approx(
                {t: v.logprob for t, v in before.items()}, abs=1e-4
            )


def test_ranks_that_do_not_divide_an_expert_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 ranks must divide the model's 47 columns of an expert"):
        make_llm(tmp_path, "MixtralForCausalLM", tensor_parallel_size=2)


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_ranks_cut_sinks_biases_and_blocks(quantization: str, tmp_path: Path) -> None:
    # Three blocks of an expert: one rank has two of them.
    fields = GPT_OSS | {"num_hidden_layers": 2, "layer_types": None}
    write_folder(tmp_path, fields, make_tensors(fields))
    options = OPTIONS | {"load_format": "auto", "quantization": quantization}
    check_ranks(LLM(str(tmp_path), **options), tmp_path)


def test_ranks_that_would_cut_blocks_are_refused(tmp_path: Path) -> None:
    fields = GPT_OSS | {"intermediate_size": 32}
    write_folder(tmp_path, fields, make_tensors(fields))
    with pytest.raises(ConfigError, match="2 ranks cannot share the model's 32 columns of an expert"):
        LLM(str(tmp_path), tensor_parallel_size=2, **OPTIONS | {"load_format": "auto"})
