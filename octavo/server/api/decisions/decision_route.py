"""POST /v1/decisions: scores every choice of every question, a bounded number of requests at a time.

A question is a request for all choices of one token and one for each longer choice; all of them share the
input's blocks and the engine's steps.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.decisions import decided, in_requests, scores_of
from octavo.engine.prompt_reader import ScoringParams, TokenIds
from octavo.errors import NotReadyError
from octavo.outputs import RequestOutput
from octavo.server.api.decisions.decision_input import Asked, Forest
from octavo.server.api.decisions.decision_structs import (
    AnyAnswer,
    ChoiceAnswer,
    ChoiceProbability,
    Decisions,
    DecisionsUsage,
    InputTokens,
    LevelProbability,
    OutputTokens,
    PredicateAnswer,
    ScoreAnswer,
)
from octavo.server.api.sse import json_response
from octavo.server.context import Context, new_id, note_left_out
from octavo.server.limits import while_present

Found = TypeVar("Found")

# The most scores of one body that are under way at a time, and the most tokens that their prompts may have.
_MOST_SCORES, _MOST_TOKENS = 256, 4 << 20


async def decisions(context: Context, request: Request) -> Response:
    """Answer questions."""
    body = await context.read_body(request)

    async def work() -> Decisions:
        read, left_out = await context.read_apart(request, body)
        note_left_out(request, left_out)
        forest = msgspec.msgpack.decode(read, type=Forest)
        return await _Scorer(context, request, forest).answer()

    return json_response(await while_present(request, work()))


class _Scorer:
    """Scores the questions of one body."""

    def __init__(self, context: Context, request: Request, forest: Forest) -> None:
        self._context = context
        self._forest = forest
        self._fields = forest.fields
        self._id = new_id("dec", request, forest.fields.request_id)
        self._salt = context.salt(request, forest.fields.cache_salt)
        self._shared = TokenIds.of(forest.shared)
        self._turns = asyncio.Semaphore(max(1, min(_MOST_SCORES, _MOST_TOKENS // len(forest.shared))))
        self._has_begun = False
        self._num_tokens = self._num_cached = self._num_cached_before = 0

    async def answer(self) -> Decisions:
        """Score everything; the scores that are under way end with this call.

        Raises:
            OctavoError, ApiError: as Context.generate, and why a score failed.
        """
        answers = await _all(self._answer(asked) for asked in self._forest.questions)
        return Decisions(
            id=self._id,
            created=int(time.time()),
            model=self._context.model,
            answers=answers,
            usage=self._usage(),
            prompt_token_ids=self._forest.shared if self._fields.return_token_ids else UNSET,
        )

    def _usage(self) -> DecisionsUsage:
        asked = self._forest.questions
        num = len(self._forest.shared) + sum(
            len(one.token_ids) + sum(map(len, one.choice_ids)) for one in asked
        )
        return DecisionsUsage(
            input_tokens=num,
            input_tokens_details=InputTokens(
                cached_tokens=self._num_cached_before, cache_write_tokens=num - self._num_cached_before
            ),
            output_tokens_details=OutputTokens(),
            total_tokens=num,
            scored_tokens=self._num_tokens,
            shared_tokens=self._num_cached,
        )

    async def _answer(self, asked: Asked) -> AnyAnswer:
        normalized = self._fields.length_normalized
        outputs = await _all(
            self._score(asked.token_ids, asked.choice_ids[places[0]], params)
            for places, params in in_requests(asked.choice_ids)
        )
        scores = scores_of(asked.choice_ids, outputs)
        found = decided([*map(str, range(len(scores)))], scores, length_normalized=normalized)
        logprobs = [score.normalized_logprob if normalized else score.logprob for score in scores]
        token_ids = asked.token_ids if self._fields.return_token_ids else UNSET
        return answer_of(asked, int(found.choice), [*found.probabilities.values()], logprobs, token_ids)

    async def _score(
        self, question: Sequence[int], choice: Sequence[int], params: ScoringParams
    ) -> RequestOutput:
        async with self._turns:
            prompt = self._shared + TokenIds.of([*question, *choice])
            start = len(prompt.listed) - len(choice)
            is_first, self._has_begun = not self._has_begun, True
            generation = await self._context.generate(
                [prompt],
                params,
                cache_salt=self._salt,
                priority=self._fields.priority or 0,
                prompt_logprobs_start=start,
                num_shared=0 if is_first else len(self._forest.shared),
                waits=not is_first,
            )
            (output,) = await generation.finish()
            if output.outputs[0].finish_reason == "abort":
                raise NotReadyError("the server stops, and has broken off this answer")
            self._num_tokens += len(prompt.listed) * (1 + len(params.rivals))
            self._num_cached += output.num_cached_tokens + len(prompt.listed) * len(params.rivals)
            if is_first:
                self._num_cached_before = output.num_cached_tokens
            return output


def answer_of(
    asked: Asked,
    best: int,
    shares: Sequence[float],
    logprobs: list[float],
    token_ids: list[int] | UnsetType,
) -> AnyAnswer:
    """Return the answer to a question in the form that it asked for.

    Args:
        asked: the question.
        best: position of the most likely choice.
        shares: of each choice.
        logprobs, token_ids: as in the answer.
    """
    common: dict[str, Any] = {"name": asked.name, "logprobs": logprobs, "token_ids": token_ids}
    if asked.kind == "predicate":
        return PredicateAnswer(probability=shares[0], **common)
    if asked.kind == "choice":
        listed = [ChoiceProbability(value, share) for value, share in zip(asked.values, shares, strict=True)]
        return ChoiceAnswer(
            choice=asked.values[best], confidence=shares[best], probabilities=listed, **common
        )
    levels = [
        LevelProbability(str(label), share, value)
        for value, (label, share) in enumerate(zip(asked.values, shares, strict=True))
    ]
    mean = sum(level.value * level.probability for level in levels)
    return ScoreAnswer(score=mean, confidence=shares[best], probabilities=levels, **common)


async def _all(works: Iterable[Coroutine[Any, Any, Found]]) -> list[Found]:
    """Return what all of them return; cancel the others when one fails, or when nobody waits any more."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
