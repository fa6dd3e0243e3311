"""Grammars, matchers and masks: what is allowed, what is refused, what is kept, and for how long."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from structured_helpers import CPU, EOS, VOCAB, a_request, allowed, takes

from octavo.engine.sampling.sampler import Sampler
from octavo.engine.structured import Grammars, compiler
from octavo.engine.structured.token_masks import TokenMasks, spread_on_device, spread_on_host
from octavo.errors import StructuredOutputError
from octavo.sampling_params import StructuredOutput
from octavo.tokenizer import Tokenizer


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

    monkeypatch.setattr(compiler, "grammar_source", panic)
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
