"""Ranks on GPUs through NCCL: inside CUDA graphs, one step ahead, over shared prefixes and fp8 caches."""

import os
import signal
from pathlib import Path

import pytest
import torch
from ranks_helpers import eventually, other_ranks

from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import ConfigError, EngineDeadError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two NVIDIA GPUs are needed"),
]

PREFIX = [number % 97 for number in range(200)]
PROMPTS = [[*PREFIX, number] for number in range(12)] + [[3, 1, 4], [5, 8]]
OPTIONS = {"load_format": "dummy", "device": "cuda", "num_blocks": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Of each request's first token: later ones may follow other tokens, by rounding."""
    return [next(iter((o.outputs[0].logprobs or [])[0].values())).logprob for o in outputs]


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"share_prefixes": False}], ids=str)
def test_two_gpus_give_what_one_gives(tiny_folder: Path, options: dict) -> None:
    one = LLM(str(tiny_folder), **OPTIONS, **options)
    two = LLM(str(tiny_folder), **OPTIONS, **options, tensor_parallel_size=2)
    expected, found = (llm.generate(PROMPTS, GREEDY) for llm in (one, two))
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=0.05)
    again = two.generate(PROMPTS, SamplingParams(seed=1, n=2, max_tokens=16, presence_penalty=0.5))
    assert all(len(output.outputs) == 2 for output in again)
    assert two.stats.late_work == (0, 0, 0)
    two.engine.close()


def test_a_rank_that_is_killed_ends_a_step_that_waits_for_it(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=2)
    stream = llm.stream([5, 8], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    os.kill(other_ranks()[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by SIGKILL"):
        list(stream)
    eventually(lambda: not other_ranks())


def test_each_rank_needs_a_gpu(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="device must be auto or cuda"):
        LLM(str(tiny_folder), **{**OPTIONS, "device": "cuda:1"}, tensor_parallel_size=2)
