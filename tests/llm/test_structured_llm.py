"""Structured output through the public API: valid, whatever preempts, interrupts or stands beside it."""

import json
import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_helpers import assert_drained
from structured_cases import KINDS, SCHEMA, fits, is_valid, params_of

from octavo import LLM, SamplingParams, StructuredOutput
from octavo.errors import StructuredOutputError

# More with FUZZ_SCHEMAS=1000.
NUM_SCHEMAS = int(os.environ.get("FUZZ_SCHEMAS", "20"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_model_writes_what_was_asked_for(random_model: LLM, kind: str) -> None:
    """Trap: n > 1, whose completions must not share a matcher."""
    output = random_model.generate([5, 8], params_of(kind, n=16))[0]
    assert all(completion.finish_reason == "stop" for completion in output.outputs)
    assert all(fits(KINDS[kind], completion.text) for completion in output.outputs)
    assert len({completion.text for completion in output.outputs}) > 1
    assert_drained(random_model)


def test_a_stop_string_may_begin_before_min_tokens(random_model: LLM) -> None:
    """Trap: it was never found then. It ends the output if it ends with token min_tokens, or later."""
    structured = StructuredOutput(regex="xxabcdefgh")

    def completion(min_tokens: int, stop: list[str]) -> tuple[str, int]:
        params = SamplingParams(
            temperature=0, max_tokens=20, min_tokens=min_tokens, stop=stop, structured=structured
        )
        output = random_model.generate([5, 8], params)[0].outputs[0]
        return output.text, len(output.token_ids)

    whole, num_tokens = completion(0, [])
    stopped, ends_at = completion(0, ["bcd"])
    assert (whole, stopped) == ("xxabcdefgh", "xxa")
    assert 1 < ends_at < num_tokens
    for min_tokens in range(num_tokens + 1):
        expected = (stopped, ends_at) if min_tokens <= ends_at else (whole, num_tokens)
        assert completion(min_tokens, ["bcd"]) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choice": "abc"}, "choice must be a list of strings, got 'abc'"),
        ({"choice": 5}, "choice must be a list of strings, got 5"),
        ({"json_schema": False}, "false allows no value"),
        ({"json_object": False}, "exactly one of"),
    ],
)
def test_what_is_no_structure_is_refused(random_model: LLM, fields: dict, message: str) -> None:
    with pytest.raises(StructuredOutputError, match=message):
        random_model.generate([5, 8], SamplingParams(structured=StructuredOutput(**fields)))


def test_any_object_is_an_object(random_model: LLM) -> None:
    params = SamplingParams(max_tokens=100, seed=3, n=6, structured=StructuredOutput(json_object=True))
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
    params = SamplingParams(max_tokens=150, seed=seed, n=2, temperature=1, structured=structured)
    for completion in random_model.generate([5, 8], params)[0].outputs:
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 150
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
