"""Two ranks over gloo compute what one computes."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_worker import build, outputs
from safetensors.torch import save_file

from octavo.errors import EngineError
from octavo.models import ModelConfig, parameter_shapes
from octavo.parallel import TensorParallel, connect_gloo, nccl

WORKER = Path(__file__).with_name("parallel_worker.py")
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
}


def write_model(folder: Path, fields: dict[str, Any]) -> None:
    config = TINY | fields
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = parameter_shapes(ModelConfig.from_hf(config))
    save_file(
        {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}, folder / "weights.safetensors"
    )


def run_ranks(folder: Path, size: int) -> list[dict[str, Any]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(size), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if index % 2 else pytest.mark.slow) for index, name in enumerate(CASES)],
)
def test_two_ranks_equal_one(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case])
    whole = json.loads(json.dumps(outputs(build(tmp_path, TensorParallel()))))
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
