"""From what a user asks for to Requests: ids, seeds, limits, stop tokens."""

import time
from array import array
from collections.abc import Callable, Container

from octavo.engine.request import Request
from octavo.engine.sampling.draw import mix_seed
from octavo.engine.structured.matcher import Grammar
from octavo.errors import InvalidArgumentError, SamplingParamsError
from octavo.kv import SequenceBlocks
from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams


class RequestMaker:
    """Makes the requests of one engine, and numbers them."""

    def __init__(self, seed: int, max_model_len: int, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        """Keep what all requests are made with.

        Args:
            seed: of requests that bring none; their number tells them apart.
            max_model_len: longest prompt + output, tokens.
            eos_token_ids: ids that end a text.
            vocab_size: ids that the model may give.
        """
        self._seed = seed
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._num_ids = self._num_requests = 0

    def new_id(self, live: Container[str]) -> str:
        """Return the next number that is not the id of a live request."""
        while True:
            self._num_ids += 1
            request_id = str(self._num_ids - 1)
            if request_id not in live:
                return request_id

    def checked_id(self, request_id: str | None, live: Container[str]) -> str:
        """Return a user's id, or a new one for None.

        Raises:
            InvalidArgumentError: it is not a string, is empty, or is the id of a live request.
        """
        if request_id is None:
            return self.new_id(live)
        if not isinstance(request_id, str) or not request_id:
            raise InvalidArgumentError(f"request_id must be a string that is not empty, got {request_id!r}")
        if request_id in live:
            raise InvalidArgumentError(
                f"request_id must be unique among unfinished requests, {request_id!r} is still running"
            )
        return request_id

    def check(self, params: SamplingParams) -> None:
        """Check that min_tokens leaves a token; a grammar goes on as it must.

        Raises:
            SamplingParamsError: every token would end the output.
        """
        if not params.min_tokens or params.structured is not None:
            return
        stop_token_ids = self._stop_token_ids(params)
        if len(stop_token_ids) >= self._vocab_size and stop_token_ids.issuperset(range(self._vocab_size)):
            raise SamplingParamsError(
                f"min_tokens must be 0 where every token ends the output, got {params.min_tokens}: all "
                f"{self._vocab_size} ids are stop_token_ids or EOS"
            )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        return eos_token_ids.union(params.stop_token_ids or ())

    def make(
        self,
        request_id: str,
        token_ids: "array[int]",
        params: SamplingParams,
        new_blocks: Callable[[], SequenceBlocks],
        *,
        prompt_logprobs_start: int | None,
        read_along: bool,
        priority: int,
        grammar: Grammar | None,
    ) -> list[Request]:
        """Make the params.n requests of a prompt; the first leads, the others are its forks.

        Args:
            request_id: of all of them.
            token_ids: the prompt.
            params: how to continue it.
            new_blocks: makes an empty sequence.
            prompt_logprobs_start, read_along, priority, grammar: see Engine.add_request.
        """
        self._num_requests += 1
        if prompt_logprobs_start is None and params.prompt_logprobs is not None:
            prompt_logprobs_start = 1
        seed = params.seed if params.seed is not None else mix_seed(self._seed, self._num_requests)
        metrics = RequestMetrics(arrival_s=time.monotonic(), num_prompt_tokens=len(token_ids))
        stop_token_ids = self._stop_token_ids(params)
        max_num_tokens = self._max_model_len
        if params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, len(token_ids) + params.max_tokens)
        requests = [
            Request(
                request_id=request_id,
                index=index,
                token_ids=token_ids[:],
                num_prompt_tokens=len(token_ids),
                params=params,
                max_num_tokens=max_num_tokens,
                seed=mix_seed(seed, index),
                stop_token_ids=stop_token_ids,
                blocks=new_blocks(),
                metrics=metrics,
                is_read_along=read_along,
                priority=priority,
                grammar=grammar,
                prompt_logprobs_start=prompt_logprobs_start if index == 0 else None,
            )
            for index in range(params.n)
        ]
        requests[0].forks = requests[1:]
        return requests


def salt_bytes(cache_salt: str) -> bytes:
    """Return a cache salt as blocks know it.

    Raises:
        InvalidArgumentError: it is not a string.
    """
    if not isinstance(cache_salt, str):
        raise InvalidArgumentError(f'cache_salt must be a string, "" for none, got {cache_salt!r}')
    return cache_salt.encode("utf-8", "surrogatepass")


# The request that an engine answers before it is ready, to set up what first use sets up. It takes every
# path to a token: forks, log-probabilities, filters, and changes of logits.
REHEARSAL = SamplingParams(
    n=2,
    max_tokens=4,
    min_tokens=2,
    temperature=0.5,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    logprobs=1,
    prompt_logprobs=1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    stop_token_ids=[0],
    detokenize=False,
)
# Tokens of its prompt and answer, rounded up.
REHEARSAL_TOKENS = 8
