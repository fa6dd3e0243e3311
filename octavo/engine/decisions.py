"""Decisions: many questions over one input, each answered by the most likely of its choices.

    input, read once ─┬─ question 1 ─┬─ yes      every leaf is a score: the prefix is read once,
                      │              └─ no       the engine computes only what follows it
                      └─ question 2 ─┬─ low
                                     └─ high

Input, questions and choices are tokenized apart and joined as ids, so that what they share is the same ids.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.prompt_reader import PromptReader, ScoringParams, TokenIds
from octavo.errors import ChatTemplateError, EngineError, PromptError
from octavo.outputs import DecisionOutput, RequestOutput, ScoreOutput
from octavo.tokenizer import ChatText

DEFAULT_CHOICES = ("yes", "no")
MAX_CHOICES = 255

# Stands where the question will be; no other text looks like it. It is the same for all inputs, so that equal
# ones are rendered once.
_HERE = secrets.token_hex(16)
# Divides a text that holds no other mark.
_MARK = "\ufdd0"
# A text that begins as questions do.
_PROBE = "A"
# A decision is read off at once, so a model that thinks first is asked not to.
_VARIABLES: Mapping[str, object] = {"enable_thinking": False}


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the input.

    Attributes:
        text: what is asked.
        choices: the answers to choose from, two or more different ones.
    """

    text: str
    choices: Sequence[str] = DEFAULT_CHOICES


@dataclass(frozen=True, slots=True)
class SharedInput:
    """Everything that stands before a question, and the text after it.

    Attributes:
        token_ids: what all questions share.
        lead: white space before each question, where the vocabulary joins it to what follows.
        after: text that the template writes behind each question.
        is_raw: the question is the input's plain continuation.
    """

    token_ids: TokenIds
    lead: str = ""
    after: str = ""
    is_raw: bool = False


@dataclass(frozen=True, slots=True)
class ReadQuestion:
    """A question as token ids.

    Attributes:
        token_ids: what follows the input.
        choices: ids of each choice.
    """

    token_ids: TokenIds
    choices: list[TokenIds]


def conversation(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> list[Mapping[str, Any]]:
    """Return the conversation that a chat template gets, with a mark where the question will be.

    A question ends the last message if that is the user's, because templates want turns to alternate.

    Args:
        given: a text, which is a message of the user, or messages.
        instructions: the text of a system message, or None.

    Raises:
        PromptError: there is neither text nor message.
    """
    if not given:
        raise PromptError("input must hold a text or at least one message, got none")
    messages: list[Mapping[str, Any]] = (
        [{"role": "user", "content": given}] if isinstance(given, str) else [*given]
    )
    last = messages[-1]
    content = last.get("content") if isinstance(last, Mapping) and last.get("role") == "user" else None
    if isinstance(content, str):
        messages[-1] = {**last, "content": f"{content.rstrip()}\n\n{_HERE}"}
    elif isinstance(content, list):
        messages[-1] = {**last, "content": [*content, {"type": "text", "text": f"\n\n{_HERE}"}]}
    else:
        messages.append({"role": "user", "content": _HERE})
    return messages if instructions is None else [{"role": "system", "content": instructions}, *messages]


def read_input(
    prompts: PromptReader,
    given: str | Sequence[Mapping[str, Any]],
    *,
    instructions: str | None = None,
    raw: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> SharedInput:
    """Read an input.

    Args:
        prompts: reads the model's prompts.
        given: a text or messages.
        instructions: the text of a system message.
        raw: the input is a text that questions continue, without the chat template.
        variables: further variables of the template.

    Raises:
        PromptError, RequestTooLongError: as PromptReader.read; or raw contradicts what is given.
        ChatTemplateError: the model has no template, or it refuses the messages or leaves out the question.
    """
    if raw:
        if not isinstance(given, str) or instructions is not None or variables:
            raise PromptError("raw needs an input that is a text, no instructions and no template variables")
        return SharedInput(prompts.read(given), is_raw=True)
    chat = prompts.require_chat_template().prompt(
        conversation(given, instructions),
        variables={**_VARIABLES, **(variables or {})},
        message_control_tokens=prompts.message_control_tokens,
    )
    before = chat.before(_HERE)
    if before is None:
        raise ChatTemplateError("the template leaves out the question; give raw and a text")
    after = chat.marked[len(before.marked) + len(_HERE) :]
    token_ids, lead = _divided(prompts, before)
    return SharedInput(prompts.read(token_ids), lead, after)


def _divided(prompts: PromptReader, before: ChatText) -> tuple[list[int], str]:
    """Return what all questions share, and the white space that is read with each of them.

    Some vocabularies join line breaks to the text before them, some to what follows. The division is such
    that a question's ids are those of the whole text, if there is such a division.
    """
    whole = prompts.encode_chat(ChatText(before.marked + _PROBE, before.mark))
    stem = before.marked.rstrip()
    for marked in (before.marked, stem):
        lead = before.marked[len(marked) :]
        token_ids = prompts.encode_chat(ChatText(marked, before.mark))
        if token_ids + _continued(prompts, ChatText(lead + _PROBE)) == whole:
            return token_ids, lead
    return prompts.encode_chat(before), ""


def _continued(prompts: PromptReader, text: ChatText) -> list[int]:
    """Tokenize a text that continues another."""
    mark = text.mark or _MARK
    # The empty piece before the mark says that something comes before.
    return prompts.encode_chat(ChatText(mark + text.marked, mark))


def read_question(prompts: PromptReader, shared: SharedInput, question: Question) -> ReadQuestion:
    """Read a question and its choices.

    Raises:
        PromptError: the text or a choice is empty, or there are not two or more different choices.
        RequestTooLongError: with the input and its longest choice it is too long.
    """
    text, choices = question.text, question.choices
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f"a question must be a text that is not empty, got {text!r}")
    texts = (
        choices if isinstance(choices, list | tuple) and all(isinstance(one, str) for one in choices) else ()
    )
    if not 2 <= len(set(texts)) == len(texts) <= MAX_CHOICES:
        raise PromptError(
            f"choices must be a list of 2 to {MAX_CHOICES} different texts, got {choices!r:.200}"
        )
    read = [prompts.read_continuation(choice) for choice in texts]
    if shared.is_raw:
        found = prompts.read_continuation(text)
    else:
        template = prompts.require_chat_template()
        shown = template.guarded(text.strip(), prompts.message_control_tokens)
        whole = ChatText(shared.lead + shown.marked + shared.after, shown.mark)
        found = TokenIds.of(_continued(prompts, whole))
    longest = max(len(choice.listed) for choice in read)
    prompts.check_length(len(shared.token_ids.listed) + len(found.listed) + longest)
    return ReadQuestion(found, read)


def in_requests(choices: Sequence[Sequence[int]]) -> list[tuple[list[int], ScoringParams]]:
    """Return the requests that score choices: the positions of those that each scores, and its parameters.

    The first choice of a request ends its prompt. All choices of one token are scored by one request.
    """
    single = [place for place, choice in enumerate(choices) if len(choice) == 1]
    rivals = tuple(choices[place][0] for place in single[1:])
    longer = [([place], ScoringParams()) for place, choice in enumerate(choices) if len(choice) > 1]
    return [*([(single, ScoringParams(rivals=rivals))] if single else ()), *longer]


def scores_of(choices: Sequence[list[int]], outputs: Sequence[RequestOutput]) -> list[ScoreOutput]:
    """Return the scores of choices, as the outputs of their requests tell them. Raises as `_score_of`."""
    pairs = zip(in_requests(choices), outputs, strict=True)
    by_choice = {place: output for (places, _), output in pairs for place in places}
    return [_score_of(by_choice[place], choice) for place, choice in enumerate(choices)]


def _score_of(output: RequestOutput, token_ids: list[int]) -> ScoreOutput:
    """Return the score of a prompt's last tokens, or of one that was scored in the place of the last one.

    Raises:
        OctavoError: the engine failed on the request.
        EngineError: the request was aborted.
    """
    if output.error is not None:
        raise output.error
    if output.outputs[0].finish_reason == "abort":
        raise EngineError("the request for this score was aborted before its log-probabilities were known")
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs[-len(token_ids) :]
    logprobs = [entry[token_id].logprob for entry, token_id in zip(entries, token_ids, strict=True) if entry]
    total = sum(logprobs)
    return ScoreOutput(token_ids, logprobs, total, total / len(logprobs), output.num_cached_tokens)


def decided(
    choices: Sequence[str], scores: Sequence[ScoreOutput], *, length_normalized: bool
) -> DecisionOutput:
    """Return the most likely choice, the first of equal ones, and what each is worth among them.

    Args:
        choices: their texts.
        scores: of each.
        length_normalized: compare means of their tokens' log-probabilities, not sums.
    """
    logprobs = [score.normalized_logprob if length_normalized else score.logprob for score in scores]
    most = max(logprobs)
    weights = [math.exp(logprob - most) if most > -math.inf else 1.0 for logprob in logprobs]
    total = sum(weights)
    probabilities = {choice: weight / total for choice, weight in zip(choices, weights, strict=True)}
    return DecisionOutput(choices[logprobs.index(most)], probabilities, list(scores))
