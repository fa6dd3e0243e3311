"""Two ranks of one model, each in a thread: the tokens are those of one engine alone, whatever the family."""

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from test_ahead import AheadRunner
from tiny_model import TINY_LLAMA
from torch import Tensor

from octavo import LLM, EngineConfig, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.model_runner import ModelRunner
from octavo.engine.ranks import LeaderRunner
from octavo.engine.ranks.follower import _Steps
from octavo.engine.ranks.rank_thread import RankThread
from octavo.engine.ranks.records import Record, RecordWire, encode_record
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


SEEDED = SamplingParams(seed=3, max_tokens=8, ignore_eos=True, top_k=20, logprobs=1, n=2)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WINDOWS = {"sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 2}
FAMILIES: dict[str, dict] = {
    "llama": {},
    "llama-multi-query": {"num_key_value_heads": 1},
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **WINDOWS}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **WINDOWS}
    | {"sliding_window_pattern": 2, "tie_word_embeddings": True, "num_key_value_heads": 1},
}


def make_config(folder: Path, fields: dict) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | fields))
    options = {"model": str(folder), "device": "cpu", "load_format": "dummy", "attention_impl": "torch"}
    return EngineConfig.from_dict({**options, "num_blocks": 64, "block_size": 4})


def two_ranks() -> list[TensorParallel]:
    tensors: list[Tensor | None] = [None, None]
    barrier = threading.Barrier(2)
    return [TensorParallel(rank, 2, Threads(rank, tensors, barrier)) for rank in range(2)]


def tokens(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, params)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, family: str) -> None:
    config = make_config(tmp_path, FAMILIES[family])

    def run(parallel: TensorParallel) -> list[list[list[int]]]:
        llm = LLM.from_engine(Engine(config, parallel=parallel))
        return tokens(llm, GREEDY) + tokens(llm, SEEDED)

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(run, two_ranks()))
    assert both == [run(TensorParallel())] * 2


class TwoThreads:
    """In place of Ranks: the other rank is a thread, which gets its records through a socket."""

    def __init__(self, steps: _Steps) -> None:
        ends = socket.socketpair()
        self.followers, self.thread = self, RankThread("rank 0")
        self.wire, self.theirs = (RecordWire(end) for end in ends)
        self.other = threading.Thread(target=steps.run, args=(self.theirs, None))
        self.other.start()

    def run(self, act: Callable[[], object]) -> object:
        return self.thread.call(act)

    def send(self, record: Record) -> None:
        self.wire.send(encode_record(record))

    def stop(self) -> None:
        self.thread.stop()
        self.wire.close()
        self.other.join(10)
        self.theirs.close()


@pytest.mark.parametrize("options", [{"num_blocks": 11}, {"max_num_batched_tokens": 5}], ids=str)
def test_ranks_that_run_one_step_ahead(tmp_path: Path, options: dict[str, int]) -> None:
    """As on GPUs: the next step is launched before the last one's tokens are known."""
    config = replace(make_config(tmp_path, {}), **options)
    engine, other = (Engine(config, parallel=parallel) for parallel in two_ranks())
    assert isinstance(engine.runner, ModelRunner)
    assert isinstance(other.runner, ModelRunner)
    runner = AheadRunner(engine.runner)
    ranks = TwoThreads(_Steps(AheadRunner(other.runner), engine.plan.layout))
    engine.runner = LeaderRunner(runner, engine.plan, ranks)  # type: ignore[arg-type]
    engine._reset_state()
    llm, one = LLM.from_engine(engine), LLM.from_engine(Engine(config))
    try:
        for params in (GREEDY, SEEDED, replace(SEEDED, presence_penalty=0.5, stop_token_ids=[*range(50)])):
            assert tokens(llm, params) == tokens(one, params)
            engine._in_doubt = True
        assert runner.most_in_flight == 2, "the engine never ran ahead"
        assert ranks.other.is_alive()
    finally:
        ranks.stop()
    assert not ranks.other.is_alive()
