"""Two engines, two ranks of one model, each in a thread: the tokens are those of one engine alone."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_model import TINY_LLAMA
from torch import Tensor

from octavo import LLM, EngineConfig, SamplingParams
from octavo.engine.engine import Engine
from octavo.parallel import TensorParallel

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5, 8], list(range(3, 40))]


class Threads:
    """Collectives between threads of this process: rank i writes place i, all wait, all read."""

    def __init__(self, rank: int, tensors: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.tensors, self.barrier = rank, tensors, barrier

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.tensors[self.rank] = tensor.clone()
        self.barrier.wait(timeout=60)
        gathered = [part for part in self.tensors if part is not None]
        self.barrier.wait(timeout=60)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self.all_gather(tensor)
        return tensor.copy_(sum(parts[1:], parts[0]))


@pytest.mark.parametrize("num_kv_heads", [2, 1])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=12, ignore_eos=True, top_k=20, logprobs=1, n=2),
    ],
    ids=["greedy", "seeded"],
)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, num_kv_heads: int, params: SamplingParams) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"num_key_value_heads": num_kv_heads}))
    config = EngineConfig(
        model=str(tmp_path),
        device="cpu",
        load_format="dummy",
        num_blocks=64,
        block_size=4,
        attention_impl="torch",
    )

    def tokens(parallel: TensorParallel) -> list[list[list[int]]]:
        outputs = LLM.from_engine(Engine(config, parallel=parallel)).generate(PROMPTS, params)
        return [[completion.token_ids for completion in output.outputs] for output in outputs]

    tensors: list[Tensor | None] = [None, None]
    barrier = threading.Barrier(2)
    ranks = [TensorParallel(rank, 2, Threads(rank, tensors, barrier)) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(tokens, ranks))
    assert both == [tokens(TensorParallel())] * 2
