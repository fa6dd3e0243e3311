"""Grammars, matchers and masks: what is allowed, what is refused, what is kept, and for how long."""

import json
import random
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile_grammars import HOSTILE

from octavo.engine.request import Request
from octavo.engine.sampling.sampler import Sampler
from octavo.engine.structured import Grammar, Grammars, Matcher, compiling, grammars, in_time
from octavo.engine.structured.masks import TokenMasks, spread_on_device, spread_on_host
from octavo.errors import ConfigError, SamplingParamsError, StructuredOutputError
from octavo.kv import KVCacheManager
from octavo.models import load_tokenizer, resolve_model
from octavo.outputs import RequestMetrics
from octavo.sampling_params import MAX_CHOICES, MAX_GRAMMAR_BYTES, SamplingParams, StructuredOutput
from octavo.tokenizer import Tokenizer

VOCAB = 49152 + 70
"""The tokenizer's 49,152 ids, and padding that ends within a word of 32 bits."""
EOS = frozenset({0, 2})
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(resolve_model("smollm2", "auto"))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, vocab_size=VOCAB, eos_token_ids=EOS)


@pytest.fixture
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def a_request(grammar: Grammar | None, output: list[int], **fields: object) -> Request:
    """A request with a prompt of one token that has generated `output`."""
    structured = None if grammar is None else StructuredOutput(json_object=True)
    params = SamplingParams.from_dict(fields | {"structured": structured})
    stop_token_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else EOS)
    made = Request(
        request_id="r",
        index=0,
        token_ids=array("i", [1]),
        num_prompt_tokens=1,
        params=params,
        max_num_tokens=100,
        seed=0,
        stop_token_ids=stop_token_ids,
        blocks=KVCacheManager(1, 1).new_sequence(),
        metrics=RequestMetrics(),
        grammar=grammar,
    )
    for token_id in output:
        made.append_output(token_id)
    return made


def allowed(*requests: Request) -> list[list[int]]:
    """What a mask allows each request next."""
    masks = TokenMasks(VOCAB, CPU).fill(requests, [request.num_output_tokens for request in requests])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, 49152:].any(), "padding"
    return [np.flatnonzero(row).tolist() for row in bits]


def takes(matcher: Matcher, token_ids: list[int]) -> bool:
    """Feed a whole output; True if the grammar takes it and may stop there."""
    return all(matcher.accept(i) is None for i in token_ids) and bool(matcher.raw.is_accepting())


@pytest.mark.parametrize(
    "text", ["yes", 'naïve 😀\n"q"/', "\\d+", "a\tb\u2028\x01 c", "\x00z", "x\x7f", "a/b|c", "{}[]()*+?.^$"]
)
def test_choices_are_taken_literally(compiled: Grammars, ids: Callable[[str], list[int]], text: str) -> None:
    grammar = compiled.compile(StructuredOutput(choice=["no", text]))
    assert takes(grammar.matcher(), ids(text))
    assert not takes(grammar.matcher(), ids(text + "x"))
    assert not takes(grammar.matcher(), ids(text[:-1]))


@pytest.mark.parametrize(
    ("regex", "text", "fits"),
    [
        ("a/b", "a/b", True),
        ("a\nb", "a\nb", True),
        ("a.b", "a\nb", False),
        ("[0-9]{2,3}", "123", True),
        ("[0-9]{2,3}", "1", False),
        ("(?i)abc", "aBC", True),
        ("^abc$", "abc", True),
        ('"[^"]*"', '"é😀"', True),
    ],
)
def test_regexes_match_the_whole_output(
    compiled: Grammars, ids: Callable[[str], list[int]], regex: str, text: str, fits: bool
) -> None:
    assert takes(compiled.compile(StructuredOutput(regex=regex)).matcher(), ids(text)) is fits


def test_any_json_is_allowed_by_true(compiled: Grammars, ids: Callable[[str], list[int]]) -> None:
    for schema in (True, {}):
        grammar = compiled.compile(StructuredOutput(json_schema=schema))
        assert takes(grammar.matcher(), ids('[1, {"a": null}]'))
        assert not takes(grammar.matcher(), ids("[1, 2"))


def test_a_panic_is_an_error_like_others(compiled: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As pyo3 raises it."""

    def panic(structured: StructuredOutput) -> str:
        raise Panic("index out of bounds")

    monkeypatch.setattr(compiling, "grammar_source", panic)
    with pytest.raises(StructuredOutputError, match="index out of bounds"):
        compiled.compile(StructuredOutput(choice=["panic"]))


def test_a_grammar_may_ask_for_special_tokens(compiled: Grammars, ids: Callable[[str], list[int]]) -> None:
    grammar = compiled.compile(StructuredOutput(grammar='start: <|im_start|> "a"'))
    assert allowed(a_request(grammar, [])) == [[1]]
    assert takes(grammar.matcher(), [1, *ids("a")])


def test_eos_is_allowed_where_the_output_may_end_alone(
    compiled: Grammars, ids: Callable[[str], list[int]]
) -> None:
    grammar = compiled.compile(StructuredOutput(regex="[0-9]{2,}"))
    one, two = a_request(grammar, ids("7")), a_request(grammar, ids("77"))
    first, second = allowed(one, two)
    assert not EOS & set(first)
    assert set(second) - set(first) == EOS
    assert set(first) >= set(ids("5"))


def test_an_output_ends_where_nothing_can_follow(compiled: Grammars, ids: Callable[[str], list[int]]) -> None:
    grammar = compiled.compile(StructuredOutput(choice=["yes", "no"]))
    request = a_request(grammar, ids("yes"), ignore_eos=True, min_tokens=9)
    assert request.finish_reason == "stop"
    assert allowed(request) == [sorted(EOS)], "no other way is left, whatever min_tokens says"


def test_min_tokens_and_ignore_eos_hold_while_there_is_another_way(
    compiled: Grammars, ids: Callable[[str], list[int]]
) -> None:
    grammar = compiled.compile(StructuredOutput(regex="[0-9]+"))
    stop = ids("5")[0]
    fields = [{}, {"ignore_eos": True}, {"min_tokens": 2}, {"min_tokens": 3}]
    rows = allowed(*(a_request(grammar, ids("71"), stop_token_ids=[stop], **field) for field in fields))
    assert [bool(EOS & set(row)) for row in rows] == [True, False, True, False]
    assert [stop in row for row in rows] == [True, True, True, False]


def test_special_tokens_are_no_text(compiled: Grammars, tokenizer: Tokenizer) -> None:
    (row,) = allowed(a_request(compiled.compile(StructuredOutput(regex="(.|\n)*")), []))
    assert set(row) & tokenizer.special_ids == EOS
    assert len(row) > 40_000


def test_a_token_outside_the_grammar_fails_the_request_and_is_not_appended(
    compiled: Grammars, ids: Callable[[str], list[int]]
) -> None:
    request = a_request(compiled.compile(StructuredOutput(choice=["yes"])), [])
    request.append_output(ids("no")[0])
    assert isinstance(request.error, StructuredOutputError)
    assert request.finish_reason == "error"
    assert request.num_output_tokens == 0


def test_a_matcher_in_error_says_so_at_the_next_token(
    compiled: Grammars, ids: Callable[[str], list[int]]
) -> None:
    grammar = compiled.compile(StructuredOutput(regex=r"(\w+\s?){500}"))
    request, rng = a_request(grammar, []), random.Random(0)
    for _ in range(60):
        (row,) = allowed(request)
        request.append_output(rng.choice(row))
        if request.is_finished or request.error is not None:
            break
    assert "too many expressions" in str(request.error)
    assert compiled.compile(StructuredOutput(regex=r"(\w+\s?){500}")) is not grammar, "its lexer is full"


def test_rewound_and_fresh_matchers_allow_the_same(
    compiled: Grammars, ids: Callable[[str], list[int]]
) -> None:
    """Trap: a matcher that took EOS has stopped."""
    grammar = compiled.compile(StructuredOutput(json_schema={"type": "array", "items": {"type": "integer"}}))
    output = [*ids("[1, 22, 3]"), 2]
    request = a_request(grammar, output)
    assert request.finish_reason == "stop"
    for num in range(len(output) - 1, -1, -1):
        request.rewind()
        for token_id in output[:num]:
            request.append_output(token_id)
        fresh = a_request(grammar, output[:num])
        one, other = allowed(request, fresh)
        assert one == other
        assert output[num] in one or num == len(output) - 1


def test_matchers_of_a_grammar_do_not_see_one_another(
    compiled: Grammars, ids: Callable[[str], list[int]]
) -> None:
    grammar = compiled.compile(StructuredOutput(choice=["yes", "no"]))
    before = allowed(a_request(grammar, []))
    a_request(grammar, ids("yes"))
    a_request(grammar, ids("wrong"))
    assert allowed(a_request(grammar, [])) == before


def test_masks_forbid_by_minus_infinity_and_leave_other_rows_alone(
    compiled: Grammars, ids: Callable[[str], list[int]]
) -> None:
    grammar = compiled.compile(StructuredOutput(regex="[0-9]+"))
    requests = [
        a_request(None, []),
        a_request(grammar, ids("7")),
        a_request(None, [5]),
        a_request(grammar, []),
    ]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    changed = logits.clone()
    TokenMasks(VOCAB, CPU).forbid_(changed, requests, [len(request.token_ids) for request in requests])
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    for row in (1, 3):
        kept = allowed(requests[row])[0]
        assert torch.isfinite(changed[row]).nonzero().flatten().tolist() == kept
        assert torch.equal(changed[row, kept], logits[row, kept])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 101])
def test_every_bit_is_applied_to_its_token(vocab_size: int) -> None:
    """Bit 31, the sign, is one of them."""
    rng = np.random.default_rng(0)
    masks = rng.integers(-(2**31), 2**31, (3, -(-vocab_size // 32))).astype(np.int32)
    logits = torch.zeros(5, vocab_size)
    TokenMasks(vocab_size, CPU).apply_(logits, [0, 2, 4], masks)
    for row, mask in zip((0, 2, 4), masks.tolist(), strict=True):
        expected = [0.0 if mask[i // 32] >> i % 32 & 1 else -torch.inf for i in range(vocab_size)]
        assert logits[row].tolist() == expected
    assert not logits[[1, 3]].any()
    sent = torch.from_numpy(masks.view(np.uint8))
    assert torch.equal(spread_on_device(sent), spread_on_host(sent))


def test_all_options_together_stay_within_the_grammar(
    compiled: Grammars, ids: Callable[[str], list[int]]
) -> None:
    grammar = compiled.compile(StructuredOutput(regex="[0-9]+"))
    options = [
        {"temperature": 0.0, "logit_bias": {int(i): 100.0 for i in ids("word")}},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "top_k": 5},
        {"min_p": 0.9, "top_p": 0.1, "logprobs": 3},
        {"min_tokens": 9, "ignore_eos": True, "top_p": 0.5},
        {"temperature": 100.0, "top_k": 40_000},
    ]
    structured = StructuredOutput(regex="[0-9]+")
    requests = [
        a_request(grammar, ids("71"), structured=structured, max_tokens=99, **fields) for fields in options
    ]
    sampler, rows = Sampler(VOCAB, CPU), allowed(*requests)
    for seed in range(20):
        logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed))
        own = logits.log_softmax(-1)
        sampled = sampler.sample(logits, requests, [3] * len(requests))
        for token, row in zip(sampled, rows, strict=True):
            assert token.error is None
            assert token.token_id in row
        assert sampled[2].top is not None
        best = own[2].topk(3)
        assert [entry[0] for entry in sampled[2].top[:3]] == best.indices.tolist(), "the model's own"


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
    monkeypatch.setattr(in_time, "DEADLINE_S", 0.1)
    hold = threading.Event()
    monkeypatch.setattr(compiling, "grammar_source", lambda structured: hold.wait(20) and "")
    for number in range(in_time.MAX_RUNNING):
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
    monkeypatch.setattr(grammars, "_MAX_KEPT_BYTES", 3000)
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
    from octavo.engine.structured import grammar as module

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
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"octavo\[structured\]"):
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
