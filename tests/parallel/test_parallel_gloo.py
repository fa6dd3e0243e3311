"""Two ranks over gloo compute what one computes."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import DictWeights, PagedSequences, greedy, make_decoder, run_chunked
from safetensors.torch import load_file, save_file

from octavo.errors import EngineError
from octavo.models import Decoder, ModelConfig, parameter_shapes
from octavo.parallel import TensorParallel, connect_gloo, nccl

TINY: dict[str, Any] = {
    # Odd on purpose: the last rank's part of the vocabulary is padded.
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "biases-untied": {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qk-norm-tied-replicated-kv": {
        "architectures": ["Gemma3ForCausalLM"],
        "num_key_value_heads": 1,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "norms-of-outputs-alone": {
        "architectures": ["Olmo3ForCausalLM"],
        "num_key_value_heads": 2,
        "sliding_window": 4,
        "attention_bias": True,
    },
    "heads-by-layer-shared-caches-and-inputs": {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "sliding_window": 4,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 61,
    },
    "experts-beside-a-feed-forward": {
        "architectures": ["Gemma4ForCausalLM"],
        "num_key_value_heads": 2,
        "sliding_window": 4,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "multipliers": {
        "architectures": ["GraniteForCausalLM"],
        "num_key_value_heads": 2,
        "embedding_multiplier": 12,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
    },
}


def write_model(folder: Path, fields: dict[str, Any]) -> None:
    config = TINY | fields
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = parameter_shapes(ModelConfig.from_hf(config))
    save_file(
        {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}, folder / "weights.safetensors"
    )


def build(folder: Path, parallel: TensorParallel) -> Decoder:
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return make_decoder(config, DictWeights(load_file(folder / "weights.safetensors")), parallel=parallel)


def outputs(decoder: Decoder) -> dict[str, Any]:
    """Logits of ragged prompts and a greedy continuation."""
    vocab_size = decoder.config.vocab_size
    prompts = {"a": [i * 7 % vocab_size for i in range(13)], "b": [vocab_size - 1, 0], "c": list(range(5))}
    sequences = PagedSequences(decoder, block_size=4)
    logits = run_chunked(sequences, prompts)
    return {
        "num_kv_heads": decoder.num_kv_heads,
        "logits": {name: rows.tolist() for name, rows in logits.items()},
        "tokens": greedy(sequences, logits, 10),
    }


def run_ranks(folder: Path, size: int) -> list[dict[str, Any]]:
    """What each rank computes, each in a thread of its own."""

    def run(rank: int) -> dict[str, Any]:
        return outputs(build(folder, connect_gloo(rank, size, folder / "rendezvous")))

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(run, range(size))]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case])
    whole = outputs(build(tmp_path, TensorParallel()))
    ranks = run_ranks(tmp_path, 2)
    for rank in ranks:
        assert rank["num_kv_heads"] == 1
        assert rank["tokens"] == whole["tokens"]
        for name, rows in whole["logits"].items():
            torch.testing.assert_close(
                torch.tensor(rank["logits"][name]), torch.tensor(rows), atol=1e-5, rtol=1e-5
            )
    assert ranks[0]["logits"] == ranks[1]["logits"]


def test_a_rank_that_nobody_meets_gives_up(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="rank 0 of 2 did not meet the others"):
        connect_gloo(0, 2, tmp_path / "rendezvous", timeout_s=0.5)


def test_nccl_is_called_as_gloo_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls on a process group that needs no GPU: two ranks, each a thread."""
    monkeypatch.setattr(nccl, "_is_dry_run", lambda: False)

    def run(rank: int) -> tuple[list[float], list[list[list[float]]]]:
        connected = connect_gloo(rank, 2, tmp_path / "rendezvous").group
        group = nccl.NcclCollectives(connected._group, 2)  # type: ignore[union-attr]
        parallel = TensorParallel(rank, 2, group)
        summed = parallel.all_reduce(torch.tensor([rank + 1.0, 5.0]))
        gathered = parallel.all_gather_last_dim(torch.tensor([[rank, 7.0], [8.0, rank]]))
        parallel.abort()
        parallel.abort()
        with pytest.raises(EngineError, match="this rank has left the others"):
            parallel.all_reduce(torch.zeros(1))
        return summed.tolist(), gathered.tolist()

    with ThreadPoolExecutor(2) as threads:
        both = [*threads.map(run, range(2))]
    assert both == [([3.0, 10.0], [[0.0, 7.0, 1.0, 7.0], [8.0, 0.0, 8.0, 1.0]])] * 2
