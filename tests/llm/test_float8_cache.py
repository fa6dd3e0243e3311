"""kv_cache_dtype="fp8" through the engine: what it saves, what it costs in accuracy, what refuses it.

What any narrow cache must do is tested for both; see test_bfloat16_kv_cache.py.
"""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from llm_helpers import assert_drained

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.engine import Engine
from octavo.errors import ConfigError

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[i % 101 for i in range(start, start + length)] for start, length in ((3, 1), (9, 17), (3, 40))]
TEXT = """\
The tide comes in twice a day because the moon pulls on the sea. Where the shore is flat, the water
walks a long way; where it is steep, it only climbs. Sailors learned to read it long before anyone
could say why. They kept tables, first in their heads and later on paper, and a harbour whose table
was wrong soon had no visitors. In 1687 Newton explained the pull, and a century later Laplace
explained why the sea does not simply follow the moon: water is slow, and the basin it lies in has a
rhythm of its own. A bay whose rhythm is close to twelve hours answers the moon the way a swing
answers a patient child. That is why the water in one bay rises sixteen metres and in the next
hardly at all."""


def tokens(llm: LLM) -> list[list[int]]:
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert_drained(llm)
    return outputs


def test_a_number_takes_one_byte(tiny: MakeLLM) -> None:
    exact, rough = (tiny(kv_cache_dtype=dtype).engine for dtype in ("auto", "fp8"))
    assert exact.plan.kv_dtype == torch.float32
    assert rough.runner.kv_cache.data.dtype == torch.float8_e4m3fn
    assert rough.plan.kv_bytes_per_token * 4 == exact.plan.kv_bytes_per_token
    assert rough.plan.kv_bytes == rough.runner.kv_cache.nbytes
    assert rough.manager.bytes_per_block * 4 == exact.manager.bytes_per_block


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 3}, {"num_blocks": 19}, {"block_size": 16}])
@pytest.mark.parametrize(("dtype", "impl"), [("fp8", "auto"), ("bf16", "auto"), ("bf16", "torch")])
def test_schedules_warm_caches_and_preemption_change_no_token(
    tiny: MakeLLM, dtype: str, impl: str, options: dict[str, object]
) -> None:
    """What a block holds does not depend on what was stored before it."""
    cold = tiny(kv_cache_dtype=dtype, attention_impl="reference", enable_prefix_caching=False)
    expected = tokens(cold)
    llm = tiny(kv_cache_dtype=dtype, attention_impl=impl, **options)
    assert tokens(llm) == expected
    assert tokens(llm) == expected


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_forks_copy_blocks(tiny: MakeLLM, dtype: str) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=10, ignore_eos=True)
    together, separate = (
        tiny(kv_cache_dtype=dtype, **options).generate(PROMPTS[1], params)[0].outputs
        for options in ({}, {"enable_prefix_caching": False, "max_num_seqs": 1})
    )
    assert [o.token_ids for o in together] == [o.token_ids for o in separate]


def test_compiled_attention_refuses_it(tiny: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r'"c" cannot run.*use impl="auto" or "torch"'):
        tiny(kv_cache_dtype="fp8", attention_impl="c")


def test_costs_little_accuracy(idle_exact: LLM) -> None:
    """Teacher-forced on the real model; benchmarks/fp8_accuracy.py and ADR 9 have the figures."""
    engine = idle_exact.engine
    config = dataclasses.replace(engine.config, kv_cache_dtype="fp8", num_blocks=32)
    rough = LLM.from_engine(Engine(config, decoder=engine.runner.decoder))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    a, b = (llm.generate(TEXT, params)[0] for llm in (idle_exact, rough))
    agreement = sum(x == y for x, y in zip(best_ids(a), best_ids(b), strict=True)) / len(best_ids(a))
    assert agreement >= 0.9
    assert abs(perplexity(b) / perplexity(a) - 1) < 0.03
    assert perplexity(a) != perplexity(b)


def best_ids(output: RequestOutput) -> list[int]:
    """Most likely token at each position."""
    return [min(entry, key=lambda t: entry[t].rank) for entry in (output.prompt_logprobs or [])[1:] if entry]


def perplexity(output: RequestOutput) -> float:
    """Of the prompt's tokens after the first."""
    entries = (output.prompt_logprobs or [])[1:]
    own = [entry[t].logprob for t, entry in zip(output.prompt_token_ids[1:], entries, strict=True) if entry]
    return math.exp(-sum(own) / len(own))
