"""The public API on a tiny random model: equivalences, stops, log-probabilities, forks, aborts, errors."""

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from llm_helpers import assert_drained
from tiny_model import TINY_LLAMA

from octavo import LLM, RequestOutput, SamplingParams
from octavo.attention.choice import choose_impl
from octavo.attention.cpu import kernel
from octavo.errors import (
    ChatTemplateError,
    ConfigError,
    EngineError,
    InvalidArgumentError,
    OctavoError,
    PromptError,
    RequestTooLongError,
    SamplingParamsError,
)

MakeLLM = Callable[..., LLM]
PROMPTS = [
    [i % 101 for i in range(start, start + length)] for start, length in ((3, 1), (5, 4), (9, 17), (3, 40))
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def alone(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [ids(llm.generate(prompt, params))[0] for prompt in PROMPTS]


SAMPLING = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=7, max_tokens=12, ignore_eos=True, top_p=0.9, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def tokens_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The reference's tokens of each prompt by itself, by the name of how they are sampled."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    options = {"attention_impl": "reference", "enable_prefix_caching": False}
    return {
        name: alone(LLM(str(folder), load_format="dummy", num_blocks=64, block_size=4, **options), params)
        for name, params in SAMPLING.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1, "num_blocks": 256},
        {"block_size": 16},
        {"max_num_batched_tokens": 3},
        {"num_blocks": 16, "max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1},
        {"attention_impl": "reference"},
        {"attention_impl": "torch"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_any_schedule_gives_the_tokens_of_each_request_alone(
    tiny: MakeLLM, tokens_alone: dict[str, list[list[int]]], options: dict[str, object], sampling: str
) -> None:
    params, expected = SAMPLING[sampling], tokens_alone[sampling]
    llm = tiny(**options)
    assert ids(llm.generate(PROMPTS, params)) == expected
    assert ids(llm.generate(PROMPTS[::-1], params)) == expected[::-1]  # warm, other order
    assert_drained(llm)


def test_preempted_equals_undisturbed(tiny: MakeLLM) -> None:
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True, presence_penalty=0.5, logprobs=2)
    expected = [tiny().generate(prompt, params)[0] for prompt in PROMPTS]
    llm = tiny(num_blocks=19)
    outputs = llm.generate(PROMPTS, params)
    assert llm.stats.num_preemptions > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == llm.stats.num_preemptions
    assert ids(outputs) == ids(expected)
    for got, want in zip(outputs, expected, strict=True):
        assert got.outputs[0].cumulative_logprob == pytest.approx(
            want.outputs[0].cumulative_logprob, abs=1e-3
        )
    assert_drained(llm)


def test_forked_equals_separate(tiny: MakeLLM) -> None:
    """Completion i of n has the tokens that its seed gives, however the prompt is shared."""
    llm = tiny()
    together = llm.generate(PROMPTS[2], SamplingParams(n=5, seed=11, max_tokens=10, ignore_eos=True))[0]
    cold = tiny(enable_prefix_caching=False, max_num_seqs=1)
    separate = cold.generate(PROMPTS[2], SamplingParams(n=5, seed=11, max_tokens=10, ignore_eos=True))[0]
    assert ids([together]) == ids([separate])
    assert len({tuple(completion.token_ids) for completion in together.outputs}) > 1
    assert [completion.index for completion in together.outputs] == [0, 1, 2, 3, 4]
    assert_drained(llm)


def test_unseeded_requests_differ_but_an_engine_seed_repeats_them(tiny: MakeLLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = ids(tiny(seed=1).generate([[1, 2], [1, 2]], params))
    assert first != second
    assert ids(tiny(seed=1).generate([[1, 2], [1, 2]], params)) == [first, second]


def test_streamed_equals_whole(tiny: MakeLLM) -> None:
    llm = tiny()
    whole = llm.generate(PROMPTS[1], GREEDY)[0]
    deltas = list(llm.stream(PROMPTS[1], GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].output is not None
    assert deltas[-1].finish_reason == "length"
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_interleaved_streams(tiny: MakeLLM) -> None:
    llm = tiny()
    expected = alone(llm, GREEDY)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    got: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(12):
        for tokens, stream in zip(got, streams, strict=True):
            tokens += next(stream).token_ids
    assert got == expected
    for stream in streams:
        assert next(stream, None) is None
    assert_drained(llm)


def test_leaving_a_stream_aborts_it(tiny: MakeLLM) -> None:
    llm = tiny()
    stream = llm.stream(PROMPTS[2], SamplingParams(max_tokens=100, n=3, ignore_eos=True))
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_drained(llm)


def test_abort_ends_a_stream(tiny: MakeLLM) -> None:
    llm = tiny()
    stream = llm.stream(PROMPTS[2], SamplingParams(max_tokens=100, ignore_eos=True))
    request_id = next(stream).request_id
    llm.abort(request_id)
    last = list(stream)[-1]
    assert last.finish_reason == "abort"
    assert last.output is not None
    assert last.output.finished
    llm.abort(request_id)
    llm.abort("never existed")
    assert_drained(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
def test_abort_at_any_time_leaks_nothing(tiny: MakeLLM, num_steps: int) -> None:
    llm = tiny(num_blocks=20, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=20, n=2, ignore_eos=True)
    outputs = [llm.engine.add_request(prompt, params) for prompt in PROMPTS]
    for _ in range(num_steps):
        llm.engine.step()
    for output in outputs:
        llm.engine.abort(output.request_id)
        llm.engine.manager.check_invariants()
    assert_drained(llm)


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


BAD_PROMPTS = [
    ([], PromptError),
    ("text without a tokenizer", PromptError),
    ([101], PromptError),
    ([-1], PromptError),
    ([2**63], PromptError),
    ([1.5], PromptError),
    ([True], PromptError),
    ([0, 1, 5, False], PromptError),
    ([5, np.True_], PromptError),
    ([5, np.float32(6)], PromptError),
    ([5, 6.0], PromptError),
    ([5, -(2**31) - 1], PromptError),
    ([2**32 + 5], PromptError),
    ([[1, 2], [3, 4]], PromptError),
    (["a", 1], PromptError),
    ({"prompt_token_ids": []}, PromptError),
    ({"prompt_tokens": [1]}, PromptError),
    ({"prompt": "a", "prompt_token_ids": [1]}, PromptError),
    ({}, PromptError),
    ({"prompt_token_ids": 7}, PromptError),
    ([1] * 512, RequestTooLongError),
    ([1] * 257, RequestTooLongError),
]


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([3, 1, 99]),
        (3, 1, 99),
        [3, np.int64(1), 99],
        [np.uint8(3), 1, 99],
        np.array([3, 1, 99], dtype=np.uint8),
    ],
    ids=repr,
)
def test_integers_of_any_kind_are_token_ids(tiny: MakeLLM, prompt: Sequence[int]) -> None:
    llm = tiny()
    output = llm.generate([{"prompt_token_ids": prompt}], GREEDY)[0]
    assert output.prompt_token_ids == [3, 1, 99]
    assert {type(token_id) for token_id in output.prompt_token_ids} == {int}
    assert output.outputs[0].token_ids == llm.generate([[3, 1, 99]], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(("prompt", "error"), BAD_PROMPTS, ids=[str(case[0])[:30] for case in BAD_PROMPTS])
def test_a_bad_prompt_gets_a_typed_error_alone(
    tiny: MakeLLM, prompt: object, error: type[OctavoError]
) -> None:
    llm = tiny()
    with pytest.raises(error):
        llm.generate([[1, 2], prompt], GREEDY)  # type: ignore[list-item]
    assert_drained(llm)
    good, bad = llm.generate([[1, 2], prompt], GREEDY, on_error="return")  # type: ignore[list-item]
    assert isinstance(bad.error, error)
    assert bad.outputs == []
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 12
    assert_drained(llm)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([1], SamplingParams(stop_token_ids=[101])),
        lambda llm: llm.generate([1], SamplingParams(logit_bias={101: 1.0})),
        lambda llm: llm.generate([1], SamplingParams(stop="x")),
        lambda llm: llm.generate([1], {"temperature": 0}),
        lambda llm: llm.generate([[1], [2]], [SamplingParams()]),
        lambda llm: llm.generate([1], on_error="ignore"),
        lambda llm: llm.generate(7),
        lambda llm: llm.chat([{"role": "user", "content": "hi"}]),
        lambda llm: llm.chat([]),
        lambda llm: llm.chat("hi"),
        lambda llm: llm.score([1], "text"),
        lambda llm: llm.score([1], [[]]),
        lambda llm: llm.score([], [[1]]),
        lambda llm: llm.score([1], [[101]]),
        lambda llm: llm.stream([]),
    ],
)
def test_bad_calls_are_refused(tiny: MakeLLM, call: Callable[[LLM], object]) -> None:
    llm = tiny()
    with pytest.raises((InvalidArgumentError, ChatTemplateError, SamplingParamsError)):
        call(llm)
    assert_drained(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 513},
        {"device": "tpu"},
        {"device": "cuda:99"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"attention_impl": "nonsense"},
        {"block_sise": 4},
    ],
    ids=str,
)
def test_bad_options_are_refused(tiny: MakeLLM, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        tiny(**options)


def test_a_step_that_fails_ends_only_its_requests(tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny()
    decoder = llm.engine.runner.decoder
    forward = type(decoder).forward

    def broken(*arguments: object, **keywords: object) -> object:
        monkeypatch.setattr(type(decoder), "forward", forward)
        raise RuntimeError("device fell off")

    monkeypatch.setattr(type(decoder), "forward", broken)
    with pytest.raises(EngineError, match="device fell off"):
        llm.generate(PROMPTS, GREEDY)
    assert_drained(llm)
    assert len(ids(llm.generate(PROMPTS, GREEDY))) == 4


def test_an_output_that_fails_ends_only_its_request(tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny()
    accept = llm.engine.outputs.accept

    def broken(request: object, sampled: object) -> object:
        if request.request_id == "1" and request.num_output_tokens == 3:  # type: ignore[attr-defined]
            raise ValueError("detokenizer broke")
        return accept(request, sampled)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.outputs, "accept", broken)
    outputs = llm.generate(PROMPTS, GREEDY, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True, True]
    assert outputs[1].outputs[0].finish_reason == "error"
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs if output.error is None)
    assert_drained(llm)


def test_nan_logits_end_only_their_request(tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny()
    decoder = llm.engine.runner.decoder
    compute = type(decoder).compute_logits

    def poisoned(self: object, hidden: object) -> object:
        logits = compute(self, hidden)  # type: ignore[arg-type]
        if logits.shape[0] == 4:
            logits[2, 5] = float("nan")
        return logits

    monkeypatch.setattr(type(decoder), "compute_logits", poisoned)
    outputs = llm.generate(PROMPTS, GREEDY, on_error="return")
    assert [output.error is None for output in outputs] == [True, True, False, True]
    assert_drained(llm)


def test_two_engines_in_one_process(tiny: MakeLLM) -> None:
    first, second = tiny(), tiny()
    streams = [first.stream(PROMPTS[2], GREEDY), second.stream(PROMPTS[2], GREEDY)]
    tokens = [[t for delta in stream for t in delta.token_ids] for stream in streams]
    assert tokens[0] == tokens[1]


def test_an_engine_is_ready_when_its_attention_kernels_are_compiled(tiny: MakeLLM) -> None:
    kernel._load.cache_clear()
    choose_impl.cache_clear()
    tiny()
    assert kernel._load.cache_info().currsize == 1
