"""LLM.decide: choices equal scores after the whole conversation, whatever is shared."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from octavo import LLM, Question
from octavo.engine.prompt_reader import TokenIds
from octavo.errors import ChatTemplateError, PromptError, RequestTooLongError

MakeLLM = Callable[..., LLM]
TEXT = "A fox jumped over the dog in Paris, and it rained all day. " * 8
QUESTIONS = [
    "Did it rain?",
    Question("Which city was it?", ("Paris", "London", "New York")),
    "42 foxes?",
    "(Why?)",
]


@pytest.mark.parametrize("text", [TEXT, f"{TEXT}\n", TEXT.strip(". ")])
def test_decisions_equal_scores(idle_exact: LLM, text: str) -> None:
    found = idle_exact.decide(text, QUESTIONS)
    assert found[1].choice == "Paris"
    for question, one in zip(QUESTIONS, found, strict=True):
        asked = question if isinstance(question, Question) else Question(question)
        whole = [{"role": "user", "content": f"{text.rstrip()}\n\n{asked.text}"}]
        expected = [score.logprob for score in idle_exact.score(idle_exact.chat_prompt(whole), asked.choices)]
        assert [score.logprob for score in one.scores] == pytest.approx(expected, abs=1e-3)
        assert one.choice == asked.choices[expected.index(max(expected))]
        assert [*one.probabilities] == list(asked.choices)
        assert sum(one.probabilities.values()) == pytest.approx(1)
        assert one.probabilities[one.choice] == max(one.probabilities.values())


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"tensor_parallel_size": 2}])
def test_choices_of_one_token_share_a_request(tiny: MakeLLM, options: dict[str, Any]) -> None:
    """Each is worth what it is when it is scored alone, beside longer ones and whatever the chunks are."""
    llm = tiny(**options)
    prefix = TokenIds.of([*range(3, 40)])
    choices = [TokenIds.of(ids) for ids in ([5], [6, 7], [9], [8], [9, 5], [60])]
    before = int(llm.engine.new_request_id())
    (found,) = llm._score([(prefix, choices)], "one")
    after = int(llm.engine.new_request_id())
    expected = llm.score(prefix.listed, [one.listed for one in choices], cache_salt="other")
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)
    assert len({round(one.logprob, 5) for one in found}) == len(choices)
    # One for the four choices of one token, one for each other, and the number that was asked for last.
    assert after - before == 1 + 2 + 1
    llm.engine.close()


def test_messages_instructions_and_raw(idle_exact: LLM) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    (found,) = idle_exact.decide(turns, ["Is it late?"], instructions="Be brief.")
    whole = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "Is it late?"}]
    expected = idle_exact.score(idle_exact.chat_prompt(whole), ["yes", "no"])
    assert [one.logprob for one in found.scores] == pytest.approx([one.logprob for one in expected], abs=1e-3)
    (found,) = idle_exact.decide("The sky", [Question(" is", (" blue", " a fish"))], raw=True)
    expected = idle_exact.score("The sky is", [" blue", " a fish"])
    assert [one.logprob for one in found.scores] == pytest.approx([one.logprob for one in expected], abs=1e-3)


def test_means_are_compared_if_asked_for(idle_exact: LLM) -> None:
    question = Question("Which city was it?", ("Paris", "the capital of France, where the river is"))
    for length_normalized in (False, True):
        (found,) = idle_exact.decide(TEXT, [question], length_normalized=length_normalized)
        values = [one.normalized_logprob if length_normalized else one.logprob for one in found.scores]
        weights = [math.exp(value - max(values)) for value in values]
        expected = [weight / sum(weights) for weight in weights]
        assert [*found.probabilities.values()] == pytest.approx(expected)


WRONG: list[tuple[Any, Any, dict[str, Any]]] = [
    ("", ["a"], {}),
    ([], ["a"], {}),
    ("a", "b", {}),
    ("a", [""], {}),
    ("a", [3], {}),
    ("a", [Question("b", ("c",))], {}),
    ("a", [Question("b", ("c", "c"))], {}),
    ("a", [Question("b", "cd")], {}),
    ("a", [Question("b", ("c", ""))], {}),
    ("a", ["b"], {"raw": True, "instructions": "c"}),
]


@pytest.mark.parametrize(("given", "questions", "options"), WRONG)
def test_what_is_wrong_gets_a_typed_error(
    exact: LLM, given: Any, questions: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(PromptError):
        exact.decide(given, questions, **options)


def test_what_is_too_long_is_refused_before_anything_runs(idle_exact: LLM) -> None:
    with pytest.raises(RequestTooLongError):
        idle_exact.decide("a", ["b", "word " * 9000])


def test_no_question_needs_no_answer_and_a_model_without_a_template_says_so(
    exact: LLM, tiny: Callable[..., LLM]
) -> None:
    assert exact.decide("a", []) == []
    with pytest.raises(ChatTemplateError):
        tiny().decide("a", ["b"])
