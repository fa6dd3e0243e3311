"""Bad prompts, calls and options, and steps that fail, through the public API."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from llm_cases import GREEDY, PROMPTS, MakeLLM, ids
from llm_helpers import assert_drained

from octavo import LLM, SamplingParams
from octavo.attention.cpu import c_calls
from octavo.attention.implementations import choose_impl
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
    with pytest.raises(EngineError, match="device fell off") as caught:
        llm.generate(PROMPTS, GREEDY)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.__cause__.__traceback__ is None
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
    c_calls._load.cache_clear()
    choose_impl.cache_clear()
    tiny()
    assert c_calls._load.cache_info().currsize == 1


def test_min_tokens_must_leave_a_token(tiny: MakeLLM) -> None:
    """Where every id ends the output, none could come first: that is the request's error, not the model's."""
    llm = tiny()
    everything = range(101)
    for fields in (
        {"stop_token_ids": everything},
        {"stop_token_ids": everything, "ignore_eos": True, "min_tokens": 5},
        # The model's EOS is the one that is missing.
        {"stop_token_ids": [token_id for token_id in everything if token_id != 2]},
    ):
        with pytest.raises(SamplingParamsError, match=r"min_tokens must be 0 .* all 101 ids"):
            llm.generate([[5]], SamplingParams.from_dict({"max_tokens": 9, "min_tokens": 1, **fields}))
    assert_drained(llm)
    ended = SamplingParams(max_tokens=9, stop_token_ids=everything)
    assert len(llm.generate([[5]], ended)[0].outputs[0].token_ids) == 1
    but_one = [token_id for token_id in everything if token_id != 7]
    forced = SamplingParams(
        max_tokens=9, min_tokens=3, stop_token_ids=but_one, logit_bias=dict.fromkeys(but_one, -100)
    )
    assert llm.generate([[5]], forced)[0].outputs[0].token_ids[:3] == [7, 7, 7]
    nothing = SamplingParams(max_tokens=3, temperature=0, logit_bias=dict.fromkeys(everything, -100.0))
    assert llm.generate([[5]], nothing)[0].outputs[0].token_ids
