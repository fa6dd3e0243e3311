"""A ready engine on a GPU compiles, captures and allocates nothing more, whatever is asked of it."""

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.step.result import LateWork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# Large enough for every kernel that a real model takes: heads of 128, a vocabulary as long as Qwen3's.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 1536,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
OPTIONS = [{}, {"share_prefixes": False}, {"kv_cache_dtype": "fp8"}, {"deterministic": True}]


def random_params(rng: random.Random) -> SamplingParams:
    """Every option, each now and then."""
    fields: dict[str, object] = {"max_tokens": rng.randint(1, 60), "ignore_eos": True, "detokenize": False}
    options = {
        "n": rng.randint(2, 4),
        "temperature": rng.choice([0, 0.7, 1.3]),
        "top_p": 0.9,
        "top_k": rng.choice([1, 20, 5000]),
        "min_p": 0.05,
        "seed": rng.randint(0, 99),
        "logprobs": rng.randint(0, 20),
        "prompt_logprobs": rng.randint(0, 5),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
        "logit_bias": {rng.randrange(1000): 3.0 for _ in range(rng.randint(1, 40))},
        "min_tokens": 3,
        "stop_token_ids": [rng.randrange(1000) for _ in range(rng.randint(1, 9))],
    }
    for name in options:
        if rng.random() < 0.03:
            fields[name] = options[name]
    if isinstance(fields.get("min_tokens"), int):
        fields["max_tokens"] = max(3, fields["max_tokens"])  # type: ignore[type-var]
    return SamplingParams.from_dict(fields)


def add_some(llm: LLM, rng: random.Random, documents: list[list[int]]) -> None:
    if len(llm.engine.scheduler.waiting) > 50:
        return
    for _ in range(rng.choice([0, 0, 0, 1, 1, 4, 30])):
        prompt = [rng.randrange(1000) for _ in range(int(2 ** rng.uniform(0, 12)))]
        if rng.random() < 0.5:
            prompt = rng.choice(documents) + prompt[:200]
        llm.engine.add_request(prompt, random_params(rng))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_mixed_steps_find_everything_ready(
    tiny: Callable[..., LLM], options: dict[str, object]
) -> None:
    shape = {"num_blocks": 2500, "block_size": 64, "device": "cuda", "dtype": "bfloat16"}
    llm = tiny(QWEN3, prepare=True, **shape, **options)
    rng = random.Random(1)
    documents = [[rng.randrange(1000) for _ in range(4096)] for _ in range(3)]
    for _ in range(2000):
        add_some(llm, rng, documents)
        llm.engine.step()
    assert llm.stats.num_steps > 1500
    assert llm.stats.late_work == LateWork(0, 0, 0)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


def test_an_engine_that_did_not_prepare_counts_what_it_does_late(tiny: Callable[..., LLM]) -> None:
    llm = tiny(device="cuda", dtype="bfloat16", num_blocks=100)
    assert llm.stats.late_work == LateWork(0, 0, 0)
    tokens = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert llm.stats.late_work.captured > 0
    prepared = tiny(device="cuda", dtype="bfloat16", num_blocks=100, prepare=True)
    again = prepared.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert again[0].outputs[0].token_ids == tokens[0].outputs[0].token_ids


def test_a_rehearsal_leaves_nothing_behind(tiny: Callable[..., LLM]) -> None:
    llm = tiny(device="cuda", dtype="bfloat16", num_blocks=100, prepare=True)
    stats = llm.stats
    assert (stats.num_steps, stats.num_output_tokens, stats.num_preemptions) == (0, 0, 0)
    assert stats.kv.num_free == 100
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))[0].num_cached_tokens == 0


def test_a_dropped_engine_gives_its_memory_back_at_once(tiny: Callable[..., LLM]) -> None:
    """Its objects are out of Python's collections, so a cycle of references would keep them for ever."""
    llm = tiny(device="cuda", dtype="bfloat16", num_blocks=100, prepare=True)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    runner = weakref.ref(llm.engine.runner)
    gc.disable()
    try:
        del llm
        assert runner() is None
    finally:
        gc.enable()
