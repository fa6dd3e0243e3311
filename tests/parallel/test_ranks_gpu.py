"""Ranks on GPUs: inside CUDA graphs, one step ahead, over shared prefixes and fp8 caches."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpt_oss_checkpoints import TINY as GPT_OSS
from ranks_helpers import eventually, other_ranks
from test_ranks_experts import TINY

from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import ConfigError, EngineDeadError, OutOfMemoryError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two NVIDIA GPUs are needed"),
]

PREFIX = [number % 97 for number in range(200)]
PROMPTS = [[*PREFIX, number] for number in range(12)] + [[3, 1, 4], [5, 8]]
# Few graphs: an engine is ready in seconds.
OPTIONS = {"load_format": "dummy", "device": "cuda", "num_blocks": 64, "max_num_seqs": 16}
OPTIONS |= {"max_num_batched_tokens": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Of each request's first token: later ones may follow other tokens, by rounding."""
    return [next(iter((o.outputs[0].logprobs or [])[0].values())).logprob for o in outputs]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_two_gpus_give_the_tokens_of_one_in_float32(tiny_folder: Path) -> None:
    one = LLM(str(tiny_folder), **OPTIONS, dtype="float32")
    two = LLM(str(tiny_folder), **OPTIONS, dtype="float32", tensor_parallel_size=2)
    assert tokens(two.generate(PROMPTS, GREEDY)) == tokens(one.generate(PROMPTS, GREEDY))
    two.engine.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_dtype": "fp8"}, {"share_prefixes": False}, {"all_reduce": "nccl"}],
    ids=str,
)
def test_two_gpus_give_what_one_gives(tiny_folder: Path, options: dict) -> None:
    # One GPU first: what it compiles would count as late work of an engine that is ready.
    alone = {name: value for name, value in options.items() if name != "all_reduce"}
    expected = LLM(str(tiny_folder), **OPTIONS, **alone).generate(PROMPTS, GREEDY)
    two = LLM(str(tiny_folder), **OPTIONS, **options, tensor_parallel_size=2)
    found = two.generate(PROMPTS, GREEDY)
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=0.05)
    again = two.generate(PROMPTS, SamplingParams(seed=1, n=2, max_tokens=16, presence_penalty=0.5))
    assert all(len(output.outputs) == 2 for output in again)
    assert two.stats.late_work == (0, 0, 0)
    two.engine.close()


def test_two_gpus_give_a_request_the_same_bits_in_any_company(tiny_folder: Path) -> None:
    """deterministic=True: bits do not depend on who else is in a step, nor on the run."""
    found = []
    for _ in range(2):
        two = LLM(str(tiny_folder), **OPTIONS, deterministic=True, tensor_parallel_size=2)
        together = two.generate(PROMPTS, GREEDY)
        alone = []
        for prompt in PROMPTS:
            two.reset_prefix_cache()
            alone += two.generate([prompt], GREEDY)
        for outputs in (together, alone):
            bits = [[value.logprob for entry in o.outputs[0].logprobs or [] for value in entry.values()]
                    for o in outputs]  # fmt: skip
            found.append((tokens(outputs), bits))
        two.engine.close()
    assert all(one == found[0] for one in found)


@pytest.fixture(params=["qwen3-moe", "gpt-oss"])
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Five experts, of which one rank has three; no rank can cut those of gpt-oss, a block of 32 columns."""
    fields = TINY | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8}
    fields |= {"num_experts": 5, "moe_intermediate_size": 10}
    if request.param == "gpt-oss":
        fields = GPT_OSS | {"intermediate_size": 32, "num_local_experts": 5}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_two_gpus_with_whole_experts_give_what_one_gives(mixture: Path) -> None:
    """Pairs of the other rank's experts are skipped inside CUDA graphs, for few tokens and for many."""
    expected = LLM(str(mixture), **OPTIONS).generate(PROMPTS, GREEDY)
    two = LLM(str(mixture), **OPTIONS, tensor_parallel_size=2, expert_parallel=True)
    assert logprobs(two.generate(PROMPTS, GREEDY)) == pytest.approx(logprobs(expected), abs=0.05)
    two.reset_prefix_cache()
    alone = [output for prompt in PROMPTS[-2:] for output in two.generate([prompt], GREEDY)]
    assert logprobs(alone) == pytest.approx(logprobs(expected[-2:]), abs=0.05)
    assert two.stats.late_work == (0, 0, 0)
    two.engine.close()


def test_whole_experts_give_the_tokens_of_one_gpu_in_float32(mixture: Path) -> None:
    one = LLM(str(mixture), **OPTIONS, dtype="float32")
    expected = tokens(one.generate(PROMPTS, GREEDY))
    two = LLM(str(mixture), **OPTIONS, dtype="float32", tensor_parallel_size=2, expert_parallel=True)
    assert tokens(two.generate(PROMPTS, GREEDY)) == expected
    two.engine.close()


def test_whole_experts_give_a_request_the_same_bits_in_any_company(mixture: Path) -> None:
    two = LLM(str(mixture), **OPTIONS, deterministic=True, tensor_parallel_size=2, expert_parallel=True)
    together = two.generate(PROMPTS, GREEDY)
    two.reset_prefix_cache()
    alone = [output for prompt in PROMPTS for output in two.generate([prompt], GREEDY)]
    assert tokens(alone) == tokens(together)
    assert logprobs(alone) == logprobs(together)
    two.engine.close()


def test_two_engines_side_by_side_until_a_rank_of_one_is_killed(tiny_folder: Path) -> None:
    """A rank that is killed ends a step that waits for it, in its own engine only."""
    llm = LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=2)
    (pid,) = other_ranks()
    other = LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=2)
    expected = tokens(other.generate(PROMPTS, SHORT))
    assert tokens(llm.generate(PROMPTS, SHORT)) == expected
    stream = llm.stream([5, 8], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by SIGKILL"):
        list(stream)
    assert tokens(other.generate(PROMPTS, SHORT)) == expected
    other.engine.close()
    eventually(lambda: not other_ranks())
    # No kernel of this process waits for the rank that is gone.
    torch.cuda.synchronize(0)


def test_a_rank_whose_gpu_is_full_says_so(tiny_folder: Path) -> None:
    free = torch.cuda.mem_get_info(1)[0]
    held = torch.empty(free - 2**28, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(OutOfMemoryError, match="rank 1 of 2 failed: "):
        LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=2)
    del held
    torch.cuda.empty_cache()
    assert not other_ranks()


def test_each_rank_needs_a_gpu(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="device must be auto or cuda"):
        LLM(str(tiny_folder), **{**OPTIONS, "device": "cuda:1"}, tensor_parallel_size=2)
    command = [sys.executable, "-m", "octavo", "generate", "Hi", "--model", str(tiny_folder), "-tp", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    done = subprocess.run(
        [*command, "--load-format", "dummy", "--device", "cuda"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "tensor_parallel_size=2 needs as many GPUs, but torch sees 1" in done.stderr
