"""POST /v1/decisions: scores every choice of every question, a bounded number of them at a time.

Each score is a request of its own, which shares the input's blocks, and the engine's steps, with the others.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.decisions import SCORING, decided, score_of
from octavo.engine.prompt_reader import TokenIds
from octavo.errors import NotReadyError, QueueFullError
from octavo.outputs import ScoreOutput
from octavo.server.api.decisions.decision_input import Asked, Decision, Decisions, Forest
from octavo.server.api.sse import encode
from octavo.server.api.structs import PromptTokensDetails, Usage
from octavo.server.context import Context, new_id
from octavo.server.generation import Generation
from octavo.server.limits import while_present

Found = TypeVar("Found")

# The most scores of one body that are under way at a time, and the most tokens that their prompts may have.
_MOST_SCORES, _MOST_TOKENS = 256, 4 << 20
# Seconds until a score is submitted again that found the queue full of others' requests.
_AGAIN_S = 0.05


async def decisions(context: Context, request: Request) -> Response:
    """Answer questions."""
    body = await context.read_body(request)

    async def work() -> Decisions:
        forest = msgspec.msgpack.decode(await context.read_apart(request, body), type=Forest)
        return await _Scorer(context, request, forest).answer()

    return Response(encode(await while_present(request, work())), media_type="application/json")


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
        self._num_submitted = self._num_tokens = self._num_cached = 0

    async def answer(self) -> Decisions:
        """Score everything; the scores that are under way end with this call.

        Raises:
            OctavoError, ApiError: as Context.generate, and why a score failed.
        """
        found = await _all(self._decide(index, asked) for index, asked in enumerate(self._forest.questions))
        usage = Usage(
            prompt_tokens=self._num_tokens,
            completion_tokens=0,
            total_tokens=self._num_tokens,
            prompt_tokens_details=PromptTokensDetails(self._num_cached),
        )
        return Decisions(
            id=self._id,
            created=int(time.time()),
            model=self._context.model,
            decisions=found,
            usage=usage,
            prompt_token_ids=self._forest.shared if self._fields.return_token_ids else UNSET,
        )

    async def _decide(self, index: int, asked: Asked) -> Decision:
        normalized = self._fields.length_normalized
        scores = await _all(self._score(asked.token_ids, choice) for choice in asked.choice_ids)
        found = decided(asked.choices, scores, length_normalized=normalized)
        logprobs = [score.normalized_logprob if normalized else score.logprob for score in scores]
        return Decision(
            index=index,
            choice=found.choice,
            probabilities=found.probabilities,
            logprobs=dict(zip(asked.choices, logprobs, strict=True)),
            token_ids=asked.token_ids if self._fields.return_token_ids else UNSET,
        )

    async def _score(self, question: Sequence[int], choice: Sequence[int]) -> ScoreOutput:
        async with self._turns:
            prompt = self._shared + TokenIds.of([*question, *choice])
            start = len(prompt.listed) - len(choice)
            generation = await self._submit(prompt, start)
            (output,) = await generation.finish()
            if output.outputs[0].finish_reason == "abort":
                raise NotReadyError("the server stops, and has broken off this answer")
            self._num_tokens += len(prompt.listed)
            self._num_cached += output.num_cached_tokens
            return score_of(output, len(choice))

    async def _submit(self, prompt: TokenIds, start: int) -> Generation:
        """Submit a score. Once the first one is let in, the others wait for room instead of failing."""
        is_first = self._num_submitted == 0
        self._num_submitted += 1
        while True:
            try:
                return await self._context.generate(
                    [prompt],
                    SCORING,
                    cache_salt=self._salt,
                    priority=self._fields.priority or 0,
                    prompt_logprobs_start=start,
                    num_shared=0 if is_first else len(self._forest.shared),
                )
            except QueueFullError:
                if is_first:
                    raise
            await asyncio.sleep(_AGAIN_S)


async def _all(works: Iterable[Coroutine[Any, Any, Found]]) -> list[Found]:
    """Return what all of them return; cancel the others when one fails, or when nobody waits any more."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
