"""Log-probabilities in the forms of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from collections.abc import Iterator, Sequence

from octavo.engine.prompt_reader import TokenIds
from octavo.outputs import Logprob
from octavo.sampling_params import SamplingParams
from octavo.server.api.structs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from octavo.server.api_errors import refused
from octavo.server.entry.sending import Parts
from octavo.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 1_000_000
"""Most log-probabilities of the prompts of one request, each a quarter of a kilobyte of memory."""
MAX_LOGPROBS = 8_000_000
"""The same limit for its answers, if there are several."""

Entry = dict[int, Logprob]

# JSON has no infinity.
_LOWEST = -9999.0


class LogprobWriter:
    """Writes log-probabilities of one request.

    Attributes:
        num_top: how many of the most likely tokens are shown.
    """

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, *, ids_as_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._ids_as_tokens = ids_as_tokens or tokenizer is None
        self.num_top = num_top

    def chat(
        self, token_ids: Sequence[int], entries: Sequence[Entry], parts: Parts | None = None
    ) -> ChatLogprobs:
        """Write an answer's tokens, or those of a whole answer as one of its parts."""
        content = self._chat(token_ids, entries)
        return ChatLogprobs([*content] if parts is None else parts.later(content))

    def _chat(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> Iterator[TokenLogprob]:
        for token_id, entry in zip(token_ids, entries, strict=True):
            top = [
                TopLogprob(self._text(other), _finite(entry[other].logprob), self._bytes(other))
                for other in self._top(entry)
            ]
            logprob = _finite(entry[token_id].logprob)
            yield TokenLogprob(self._text(token_id), logprob, self._bytes(token_id), top)

    def completion(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Entry | None],
        offset: int,
        parts: Parts | None = None,
    ) -> CompletionLogprobs:
        """Write a text's tokens.

        Args:
            token_ids: the tokens.
            entries: their log-probabilities; None for the first token of a prompt.
            offset: where in the text the first of them begins, in characters.
            parts: the parts of a whole answer; the most likely tokens become one of them.
        """
        tops = self._tops(token_ids, entries)
        written = CompletionLogprobs([], [], [], [*tops] if parts is None else parts.later(tops))
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._text(token_id)
            written.text_offset.append(offset)
            written.tokens.append(text)
            offset += len(text)
            written.token_logprobs.append(None if entry is None else _finite(entry[token_id].logprob))
        return written

    def _tops(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None]
    ) -> Iterator[dict[str, float] | None]:
        for token_id, entry in zip(token_ids, entries, strict=True):
            if entry is None:
                yield None
                continue
            top: dict[str, float] = {}
            for other in [*self._top(entry), token_id]:
                # Several tokens may have one text, such as parts of characters: the most likely one is shown.
                top.setdefault(self._text(other), _finite(entry[other].logprob))
            yield top

    def _top(self, entry: Entry) -> list[int]:
        ranked = sorted((logprob.rank, token_id) for token_id, logprob in entry.items())
        return [token_id for rank, token_id in ranked if rank <= self.num_top][: self.num_top]

    def _text(self, token_id: int) -> str:
        if self._ids_as_tokens or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


def prompt_logprobs(entries: Sequence[Entry | None]) -> Iterator[dict[str, PromptLogprob] | None]:
    """Yield the log-probabilities of a prompt's tokens."""
    for entry in entries:
        yield (
            None
            if entry is None
            else {
                str(token_id): PromptLogprob(_finite(found.logprob), found.rank, found.decoded_token)
                for token_id, found in entry.items()
            }
        )


def check_logprobs(
    prompts: Sequence[TokenIds], params: SamplingParams, max_model_len: int, *, num_copies: int
) -> None:
    """Refuse a request whose log-probabilities would take too much memory.

    Args:
        prompts: the request's prompts.
        params: how each is continued.
        max_model_len: most tokens of a prompt and its continuation.
        num_copies: how often the answer has those of a prompt.

    Raises:
        ApiError: 400.
    """
    lengths = [len(prompt.listed) for prompt in prompts]
    if params.prompt_logprobs is not None:
        _check_number(
            "prompt_logprobs", sum(lengths), params.prompt_logprobs, num_copies, MAX_PROMPT_LOGPROBS
        )
    if params.logprobs is not None and len(lengths) * params.n > 1:
        most = max_model_len if params.max_tokens is None else params.max_tokens
        num_tokens = sum(min(most, max_model_len - length) for length in lengths)
        _check_number("logprobs", num_tokens, params.logprobs, params.n, MAX_LOGPROBS)


def _check_number(field: str, num_tokens: int, num_top: int, num_copies: int, limit: int) -> None:
    number = num_tokens * (num_top + 1) * num_copies
    if number > limit:
        raise refused(
            field,
            f"may be at most {limit} log-probabilities in all, got {num_tokens} tokens x ({num_top} + 1) x "
            f"{num_copies} = {number}; ask for fewer, or for fewer tokens or answers at a time",
        )


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
