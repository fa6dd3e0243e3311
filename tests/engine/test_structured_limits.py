"""Grammars that are refused, bounded, kept or compiled anew."""

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_grammars import HOSTILE
from structured_helpers import EOS, VOCAB, a_request, allowed

from octavo.engine.structured import Grammars, compiler
from octavo.errors import ConfigError, SamplingParamsError, StructuredOutputError
from octavo.sampling_params import MAX_CHOICES, MAX_GRAMMAR_BYTES, SamplingParams, StructuredOutput
from octavo.tokenizer import Tokenizer


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_cheap(compiled: Grammars, name: str) -> None:
    compiled.compile(StructuredOutput(choice=["the vocabulary is read"]))
    # Of work: the clock on the wall goes on while others have the processor.
    begun_at = time.process_time()
    refusal, grammar = "", None
    try:
        grammar = compiled.compile(HOSTILE[name])
    except StructuredOutputError as error:
        refusal = str(error)
    assert time.process_time() - begun_at < 2.5
    assert len(refusal) < 700
    if grammar is None:
        return
    request, rng = a_request(grammar, [], max_tokens=99), random.Random(0)
    for _ in range(50):
        begun_at = time.process_time()
        (row,) = allowed(request)
        assert time.process_time() - begun_at < 1.5, "a step waits for it"
        request.append_output(rng.choice(row))
        if request.finish_reason is not None:
            break


def test_the_first_mask_of_a_huge_count_is_cheap(compiled: Grammars) -> None:
    compiled.compile(StructuredOutput(choice=["the vocabulary is read"]))
    begun_at = time.process_time()
    compiled.compile(StructuredOutput(regex="a{1000000000}"))
    assert time.process_time() - begun_at < 0.4


def test_a_schema_of_many_properties_is_not_too_large(compiled: Grammars) -> None:
    properties = {f"property_{i}": {"type": "string"} for i in range(1500)}
    schema = {"type": "object", "properties": properties, "required": [*properties][:500]}
    compiled.compile(StructuredOutput(json_schema=schema))


def test_hostile_grammars_leave_little_behind(compiled: Grammars) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    compiled.compile(StructuredOutput(choice=["the vocabulary is read"]))
    before = resident()
    for structured in HOSTILE.values():
        try:
            a_request(compiled.compile(structured), [])
        except StructuredOutputError:
            continue
    assert resident() - before < 200e6


def test_a_grammar_that_takes_too_long_is_refused_and_keeps_its_place(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Grammars(tokenizer, vocab_size=VOCAB, eos_token_ids=EOS)
    slow.compile(StructuredOutput(choice=["ready"]))
    monkeypatch.setattr(compiler, "DEADLINE_S", 0.1)
    hold = threading.Event()
    monkeypatch.setattr(compiler, "grammar_source", lambda structured: hold.wait(20) and "")
    for number in range(compiler.MAX_RUNNING):
        with pytest.raises(StructuredOutputError, match="more than"):
            slow.compile(StructuredOutput(choice=[f"slow {number}"]))
    with pytest.raises(StructuredOutputError, match="too many"):
        slow.compile(StructuredOutput(choice=["one more"]))
    hold.set()
    monkeypatch.undo()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            slow.compile(StructuredOutput(choice=["after all"]))
            return
        except StructuredOutputError:
            continue
    pytest.fail("places are not given back")


def test_compiling_leaves_the_size_of_other_threads_stacks(compiled: Grammars) -> None:
    before = threading.stack_size()
    compiled.compile(StructuredOutput(regex="a stack of its own"))
    assert threading.stack_size() == before


def test_the_latest_grammars_are_kept_within_a_size(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MAX_KEPT_BYTES", 3000)
    kept = Grammars(tokenizer, vocab_size=VOCAB, eos_token_ids=EOS)
    a, b, c = (StructuredOutput(choice=[name]) for name in "abc")
    first = kept.compile(a)
    second = kept.compile(b)
    assert kept.compile(a) is first
    kept.compile(c)
    assert kept.compile(a) is first, "b was used least recently"
    assert kept.compile(b) is not second
    kept.compile(StructuredOutput(regex="x" * 5000))
    assert kept.compile(a) is not first


def test_worn_grammars_are_compiled_anew(
    compiled: Grammars, ids: Callable[[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.engine.structured import matcher as module

    monkeypatch.setattr(module, "_MAX_TOKENS", 3)
    structured = StructuredOutput(regex="[0-9]+!")
    before = compiled.compile(structured)
    assert compiled.compile(structured) is before
    (digit,) = ids("7")
    a_request(before, [digit] * 3)
    after = compiled.compile(structured)
    assert after is not before
    assert compiled.compile(structured) is after


def test_threads_may_compile_at_the_same_time(tokenizer: Tokenizer) -> None:
    shared, errors = Grammars(tokenizer, vocab_size=VOCAB, eos_token_ids=EOS), []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                shared.compile(StructuredOutput(choice=[f"{(number + turn) % 4}"])).matcher()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_without_the_package_the_extra_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\[structured\]"):
        Grammars(tokenizer, vocab_size=VOCAB, eos_token_ids=EOS).compile(StructuredOutput(json_object=True))


def test_a_tokenizer_and_eos_are_needed(tokenizer: Tokenizer) -> None:
    for made in (
        Grammars(None, vocab_size=VOCAB, eos_token_ids=EOS),
        Grammars(tokenizer, vocab_size=VOCAB, eos_token_ids=frozenset()),
    ):
        with pytest.raises(StructuredOutputError, match="tokenizer"):
            made.compile(StructuredOutput(json_object=True))


def _nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


_RING: dict = {}
_RING["items"] = _RING


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json_object": False},
        {"json_object": 1},
        {"json_object": True, "regex": "a"},
        {"json_schema": 7},
        {"json_schema": "7"},
        {"json_schema": "{"},
        {"json_schema": [1]},
        {"json_schema": {"a": object()}},
        {"json_schema": {"a": float("nan")}},
        {"json_schema": _nested(65)},
        {"json_schema": _nested(100_000)},
        {"json_schema": _RING},
        {"json_schema": "[" * 60_000},
        {"json_schema": {"description": "x" * MAX_GRAMMAR_BYTES}},
        {"regex": b"a"},
        {"regex": "\ud800"},
        {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)},
        {"grammar": ["start: x"]},
        {"grammar": "é" * MAX_GRAMMAR_BYTES},
        {"choice": "yes"},
        {"choice": []},
        {"choice": [""]},
        {"choice": [1]},
        {"choice": ["a"] * (MAX_CHOICES + 1)},
        {"choice": ["\udfff"]},
        {"choise": ["a"]},
    ],
    ids=lambda fields: repr(next(iter(fields), "nothing"))[:20],
)
def test_what_is_no_grammar_is_refused_at_once(fields: dict[str, object]) -> None:
    with pytest.raises(SamplingParamsError):
        SamplingParams.from_dict({"structured": fields})


def test_a_schema_is_kept_as_text_in_its_order() -> None:
    schema = {"properties": {"b": {}, "a": {"const": "é"}}}
    made = StructuredOutput(json_schema=schema)
    assert list(json.loads(str(made.json_schema))["properties"]) == ["b", "a"]
    assert made == StructuredOutput(json_schema=made.json_schema)
    assert hash(made) == hash(StructuredOutput(json_schema=schema))
    assert made.kind == "json_schema"
    assert StructuredOutput(json_schema=True) == StructuredOutput(json_schema=" true ")
    assert StructuredOutput(json_schema=_nested(63)).kind == "json_schema"


def test_parameters_take_nothing_else() -> None:
    with pytest.raises(SamplingParamsError, match="StructuredOutput"):
        SamplingParams(structured={"json_object": True})  # type: ignore[arg-type]
