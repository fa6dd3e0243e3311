"""How answers of a tiny random model end, and what they carry: stops, log-probabilities, scores, metrics."""

import pytest
from llm_cases import GREEDY, PROMPTS, MakeLLM, ids
from llm_helpers import assert_drained

from octavo import SamplingParams


def test_stop_token_ids_and_eos(tiny: MakeLLM) -> None:
    llm = tiny()
    tokens = ids(llm.generate(PROMPTS[1], GREEDY))[0]
    stop = tokens[3]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop], ignore_eos=True)
    output = llm.generate(PROMPTS[1], params)[0]
    first = tokens.index(stop)
    assert output.outputs[0].token_ids == tokens[: first + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


def test_several_eos_ids_from_the_config(tiny: MakeLLM) -> None:
    """Trap: one eos id."""
    tokens = ids(tiny().generate(PROMPTS[1], GREEDY))[0]
    llm = tiny({"eos_token_id": [100, tokens[3]]})
    output = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert output.finish_reason == "stop"
    assert output.stop_reason is None
    assert output.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    kept = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
    assert kept.outputs[0].token_ids == tokens


def test_max_model_len_ends_the_output(tiny: MakeLLM) -> None:
    llm = tiny(max_model_len=20)
    output = llm.generate(list(range(15)), SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].finish_reason == "length"


def test_a_lone_sequence_that_fills_the_cache_ends_with_a_message(tiny: MakeLLM) -> None:
    llm = tiny(num_blocks=4, block_size=4)
    output = llm.generate([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))[0].outputs[0]
    assert output.finish_reason == "length"
    assert output.message == "the KV cache is full: it holds 16 tokens in all"
    assert len(output.token_ids) == 14
    assert_drained(llm)


def test_logprobs(tiny: MakeLLM) -> None:
    llm = tiny()
    output = llm.generate(
        PROMPTS[1], SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
    )[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 5
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entry) == 3
        assert entry[token_id].rank == 1
        assert sorted((value.logprob for value in entry.values()), reverse=True)[0] == entry[token_id].logprob
    total = sum(entry[t].logprob for t, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}], ids=str
)
def test_prompt_logprobs_cover_the_whole_prompt_even_when_it_is_cached(
    tiny: MakeLLM, options: dict[str, object]
) -> None:
    """Trap: prompt log-probabilities that silently cover only the uncached part."""
    llm = tiny(**options)
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    cold = llm.generate(prompt, params)[0]
    warm = llm.generate(prompt, params)[0]
    for output in (cold, warm):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for token_id, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            assert token_id in entry
    # The same numbers as generating token by token would give.
    step = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    for position in (1, 20, 39):
        entry = llm.generate(prompt[:position], step)[0].outputs[0].logprobs
        assert entry is not None
        assert warm.prompt_logprobs is not None
        reference = warm.prompt_logprobs[position]
        assert reference is not None
        for token_id, value in entry[0].items():
            if token_id in reference:
                assert reference[token_id].logprob == pytest.approx(value.logprob, abs=1e-4)


def test_prompt_logprobs_of_a_one_token_prompt(tiny: MakeLLM) -> None:
    output = tiny().generate([5], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    assert output.prompt_logprobs == [None]


def test_score_computes_the_prefix_once(tiny: MakeLLM) -> None:
    llm = tiny()
    prefix, continuations = PROMPTS[3], [[1], [2, 3], [4, 5, 6, 7, 8]]
    scores = llm.score(prefix, continuations)
    assert llm.stats.num_computed_tokens == 40 + 1 + (4 + 2) + (4 + 5)  # 36 of the 40 are whole blocks
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for continuation, score in zip(continuations, scores, strict=True):
        whole = tiny().generate(prefix + continuation, params)[0].prompt_logprobs
        assert whole is not None
        wanted = [
            entry[t].logprob for t, entry in zip(continuation, whole[len(prefix) :], strict=True) if entry
        ]
        assert score.token_logprobs == pytest.approx(wanted, abs=1e-4)
        assert score.logprob == pytest.approx(sum(wanted), abs=1e-4)
        assert score.normalized_logprob == pytest.approx(sum(wanted) / len(wanted), abs=1e-4)
    assert scores[2].num_cached_tokens == 36
    assert_drained(llm)


def test_score_of_a_one_token_continuation_is_finite(tiny: MakeLLM) -> None:
    """Trap: dividing by zero for one-token continuations."""
    score = tiny().score([5, 6], [[7]])[0]
    assert score.normalized_logprob == score.logprob == score.token_logprobs[0]


def test_extend_only_what_is_not_cached(tiny: MakeLLM) -> None:
    """The worked example: 7 tokens are cached, a prompt of 12 that begins with them computes 5."""
    llm = tiny(block_size=1, num_blocks=64)
    llm.generate([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    first = llm.stats.num_computed_tokens
    assert first == 7
    tokens = llm.generate([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0]
    prompt = [1, 2, 3, 4, 5, *tokens.outputs[0].token_ids, 9, 9, 9, 9, 9]
    before = llm.stats.num_computed_tokens
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))[0]
    assert output.num_cached_tokens == 7
    assert llm.stats.num_computed_tokens - before == 5


def test_cache_salts_separate_users(tiny: MakeLLM) -> None:
    llm = tiny()
    prompt = PROMPTS[3]
    assert llm.generate(prompt, GREEDY, cache_salt="a")[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, cache_salt="b")[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, cache_salt="a")[0].num_cached_tokens == 36


def test_metrics(tiny: MakeLLM) -> None:
    metrics = tiny().generate(PROMPTS[2], SamplingParams(n=2, max_tokens=4, ignore_eos=True))[0].metrics
    assert metrics.num_prompt_tokens == 17
    assert metrics.num_output_tokens == 8
    assert metrics.queue_s is not None
    assert metrics.time_to_first_token_s is not None
    assert metrics.e2e_latency_s is not None
    assert 0 <= metrics.queue_s <= metrics.time_to_first_token_s <= metrics.e2e_latency_s
