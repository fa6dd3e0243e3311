"""deterministic=True on a GPU: a request's tokens and log-probabilities are the same bits in any company.

Each case compares a request alone, whole, in an engine of its own, with the same request under a condition
that changes batches, chunks, blocks or graphs.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llm_helpers import assert_drained

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MakeLLM = Callable[..., LLM]
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 5003,
    "max_position_embeddings": 1024,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "head dim 64": {**LARGER, "head_dim": 64},
    "head dim 128, qk norms, tied": {
        **LARGER,
        "head_dim": 128,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    },
}
LENGTHS = (1, 17, 64, 150)
Completion = tuple[list[int], object, object]


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 101) for _ in range(length)]


PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(seed=5, temperature=0.9, max_tokens=24, ignore_eos=True, logprobs=1),
    SamplingParams(seed=6, temperature=1.1, top_k=30, top_p=0.9, max_tokens=24, ignore_eos=True, logprobs=0),
    SamplingParams(seed=7, max_tokens=24, ignore_eos=True, logprobs=2, repetition_penalty=1.2),
]
# The same without log-probabilities: these run in CUDA graphs, a step ahead.
QUIET = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=5, temperature=0.9, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=6, temperature=1.1, top_k=30, top_p=0.9, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=8, min_p=0.05, max_tokens=24, ignore_eos=True),
]


def maker(tiny: MakeLLM, config: dict[str, Any]) -> MakeLLM:
    """Return a function that makes deterministic engines of a model, with further options."""
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "num_blocks": 1024}
    return lambda **others: tiny(config, **{**options, "block_size": 16, **others})


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest, tiny: MakeLLM) -> MakeLLM:
    """Make a deterministic engine of one of the models."""
    return maker(tiny, MODELS[request.param])


@pytest.fixture
def make_one(tiny: MakeLLM) -> MakeLLM:
    """Make a deterministic engine of the last model."""
    return maker(tiny, list(MODELS.values())[-1])


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
    """Everything that a request gives back: token ids, their log-probabilities, the prompt's."""
    outputs = llm.generate(prompts, params)
    assert_drained(llm)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


def alone(llm: LLM, params: list[SamplingParams]) -> list[Completion]:
    """Each request in an empty engine, from an empty prefix cache."""
    completions = []
    for one_prompt, one_params in zip(PROMPTS, params, strict=True):
        llm.reset_prefix_cache()
        completions += run(llm, [one_prompt], [one_params])
    return completions


@pytest.mark.parametrize("params", [PARAMS, QUIET], ids=["logprobs", "quiet"])
def test_company_chunks_cache_preemption_and_sharing_change_no_bit(
    make: MakeLLM, params: list[SamplingParams]
) -> None:
    llm = make()
    expected = alone(llm, params)
    # A warm prefix cache, all together, then beside others of every kind, in the middle of the batch.
    assert run(llm, PROMPTS, params) == expected
    rng = random.Random(1)
    others = [prompt(rng.randrange(1, 200), 100 + i) for i in range(26)]
    other_params = [(PARAMS + QUIET)[i % 8] for i in range(26)]
    batch, batch_params = others[:13] + PROMPTS + others[13:], other_params[:13] + params + other_params[13:]
    assert run(llm, batch, batch_params)[13:17] == expected
    # Long neighbours come and go while the requests decode.
    assert run(llm, PROMPTS + others, params + other_params)[:4] == expected
    for options in (
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 100, "max_num_seqs": 3},
        {"enable_prefix_caching": False, "block_size": 64, "num_blocks": 256},
    ):
        assert run(make(**options), PROMPTS, params) == expected, options


@pytest.mark.parametrize("params", [PARAMS, QUIET], ids=["logprobs", "quiet"])
def test_preemption_changes_no_bit(make: MakeLLM, params: list[SamplingParams]) -> None:
    expected = alone(make(), params)
    llm = make(num_blocks=17)
    assert run(llm, PROMPTS, params) == expected
    assert llm.stats.num_preemptions > 0


def test_sharing_on_or_off_changes_no_bit(make_one: MakeLLM) -> None:
    document = prompt(160, 50)
    prompts = [[*document, *prompt(5 + i, 60 + i)] for i in range(12)]
    params = [(PARAMS + QUIET)[i % 8] for i in range(12)]
    llm = make_one()
    together = [run(make_one(share_prefixes=share), prompts, params) for share in (False, True)]
    for i, one_prompt in enumerate(prompts):
        llm.reset_prefix_cache()
        one = run(llm, [one_prompt], [params[i]])[0]
        assert one == together[0][i] == together[1][i]


def test_forks_equal_separate_requests(make_one: MakeLLM) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=20, ignore_eos=True, logprobs=1)
    results = [
        [
            (completion.token_ids, completion.logprobs)
            for completion in make_one(**options).generate([PROMPTS[3]], params)[0].outputs
        ]
        for options in ({}, {"max_num_seqs": 1, "enable_prefix_caching": False})
    ]
    assert results[0] == results[1]
    assert len({tuple(token_ids) for token_ids, _ in results[0]}) > 1


def test_fp8_cache_changes_no_bit_either(make_one: MakeLLM) -> None:
    expected = alone(make_one(kv_cache_dtype="fp8"), PARAMS)
    llm = make_one(kv_cache_dtype="fp8", max_num_batched_tokens=16)
    assert run(llm, PROMPTS, PARAMS) == expected
    assert run(llm, PROMPTS, PARAMS) == expected


def test_a_window_and_post_norms_change_no_bit(tiny: MakeLLM) -> None:
    config = {
        **LARGER,
        "head_dim": 64,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 40,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }
    make = maker(tiny, config)
    expected = alone(make(), PARAMS)
    for options in ({}, {"max_num_batched_tokens": 16}, {"num_blocks": 17}):
        assert run(make(**options), PROMPTS, PARAMS) == expected, options


def test_deterministic_results_are_near_the_usual_ones(make_one: MakeLLM) -> None:
    """Prompt log-probabilities, which do not depend on what is sampled."""
    params = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)] * 4
    exact, usual = (run(make_one(deterministic=mode), PROMPTS, params) for mode in (True, False))
    for (_, _, some), (_, _, others) in zip(exact, usual, strict=True):
        for mine, theirs in zip(some[1:], others[1:], strict=True):
            for token in mine.keys() & theirs.keys():
                assert abs(mine[token].logprob - theirs[token].logprob) < 0.05
