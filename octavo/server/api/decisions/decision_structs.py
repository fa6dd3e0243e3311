"""Bodies and answers of /v1/decisions: OpenAI's, and a shorter form of questions that adds nothing."""

from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.engine.decisions import MAX_CHOICES
from octavo.server.api.structs import MAX_MESSAGES, JsonObject, Priority, RequestBody, RequestId, Salt

MAX_QUESTIONS = 1024
MAX_SCORES = 8192


class ChoiceFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """A choice; a boolean is written as true or false."""

    value: str | bool
    description: str | None = None


class LevelFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """A level of a score."""

    label: str
    description: str | None = None


Choices = Annotated[list[str | ChoiceFields], Meta(min_length=2, max_length=MAX_CHOICES)]


class QuestionFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """A question.

    Attributes:
        type: with instructions: what is asked for; then the choices are listed behind them.
        instructions: the question of that type, as a text or parts.
        text: a question to which nothing is added. It has no type.
        name: the client's.
        choices: of a text or of type choice.
        levels: of type score, the lowest first.
    """

    type: Literal["predicate", "choice", "score"] | None = None
    instructions: str | list[JsonObject] | None = None
    text: str | None = None
    name: str | None = None
    choices: Choices | None = None
    levels: Annotated[list[LevelFields], Meta(min_length=2, max_length=MAX_CHOICES)] | None = None


class DecisionsRequest(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/decisions.

    Attributes:
        input: a text, or items as those of /v1/responses.
        questions: objects, or texts for short.
        choices: those of texts that have none of their own; yes and no.
        instructions: the text of a system message before the input.
        raw: the questions continue the input's text as they are; the chat template is not used.
        chat_template_kwargs: further variables of the template.
        length_normalized: compare means of log-probabilities over a choice's tokens, not sums.
        return_token_ids: add the ids that were scored after.
    """

    api: ClassVar[str] = "decisions"

    input: str | Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]
    questions: Annotated[list[str | QuestionFields], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    choices: Choices | None = None
    instructions: str | None = None
    raw: bool = False
    chat_template_kwargs: JsonObject | None = None
    length_normalized: bool = False
    return_token_ids: bool = False
    model: str | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None


class ChoiceProbability(Struct):
    """A choice's share."""

    value: str | bool
    probability: float


class LevelProbability(Struct):
    """A level's share; its value counts from 0."""

    label: str
    probability: float
    value: int


class _Answer(Struct, kw_only=True):
    """The part that all answers have.

    Attributes:
        name: the question's.
        logprobs: of each choice in order: sums over its tokens, or means if they were asked for.
        token_ids: the question's, which follow those of the input.
    """

    name: str | None
    logprobs: list[float]
    token_ids: list[int] | UnsetType = UNSET


class PredicateAnswer(_Answer, kw_only=True, tag_field="type", tag="predicate"):
    """How likely it is that a statement is true: the share of yes beside no."""

    probability: float


class ChoiceAnswer(_Answer, kw_only=True, tag_field="type", tag="choice"):
    """The most likely choice, and its share."""

    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreAnswer(_Answer, kw_only=True, tag_field="type", tag="score"):
    """The mean of the levels' values by their shares, and the share of the most likely level."""

    score: float
    confidence: float
    probabilities: list[LevelProbability]


AnyAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class InputTokens(Struct, kw_only=True):
    """How many input tokens were cached before, and how many are new in the cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(Struct, kw_only=True):
    """Nothing is generated."""

    reasoning_tokens: int = 0


class DecisionsUsage(Struct, kw_only=True):
    """Tokens of a request.

    Attributes:
        input_tokens: input, questions and choices, each once.
        scored_tokens: prompts of all choices, as separate requests would send them.
        shared_tokens: how many of those were not computed again.
    """

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int = 0
    output_tokens_details: OutputTokens
    total_tokens: int
    scored_tokens: int
    shared_tokens: int


class Decisions(Struct, kw_only=True):
    """Answer of POST /v1/decisions; answers are in the order of questions.

    Attributes:
        prompt_token_ids: those of the input, which all questions share.
    """

    id: str
    object: Literal["decision"] = "decision"
    created: int
    model: str
    answers: list[AnyAnswer]
    usage: DecisionsUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
