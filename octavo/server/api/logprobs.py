"""Log-probabilities in the forms of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from collections.abc import Sequence

from octavo.outputs import Logprob
from octavo.server.api.types import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from octavo.tokenizer import Tokenizer

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

    def chat(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> ChatLogprobs:
        """Write an answer's tokens."""
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            top = [
                TopLogprob(self._text(other), _finite(entry[other].logprob), self._bytes(other))
                for other in self._top(entry)
            ]
            logprob = _finite(entry[token_id].logprob)
            content.append(TokenLogprob(self._text(token_id), logprob, self._bytes(token_id), top))
        return ChatLogprobs(content)

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], offset: int
    ) -> CompletionLogprobs:
        """Write a text's tokens.

        Args:
            token_ids: the tokens.
            entries: their log-probabilities; None for the first token of a prompt.
            offset: where in the text the first of them begins, in characters.
        """
        written = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._text(token_id)
            written.text_offset.append(offset)
            written.tokens.append(text)
            offset += len(text)
            if entry is None:
                written.token_logprobs.append(None)
                written.top_logprobs.append(None)
                continue
            written.token_logprobs.append(_finite(entry[token_id].logprob))
            top: dict[str, float] = {}
            for other in [*self._top(entry), token_id]:
                # Of tokens with the same text, such as parts of characters, the most likely one is shown.
                top.setdefault(self._text(other), _finite(entry[other].logprob))
            written.top_logprobs.append(top)
        return written

    def _top(self, entry: Entry) -> list[int]:
        ranked = sorted((logprob.rank, token_id) for token_id, logprob in entry.items())
        return [token_id for rank, token_id in ranked if rank <= self.num_top][: self.num_top]

    def _text(self, token_id: int) -> str:
        if self._ids_as_tokens or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


def prompt_logprobs(entries: Sequence[Entry | None]) -> PromptLogprobs:
    """Write the log-probabilities of a prompt."""
    return [
        None
        if entry is None
        else {
            str(token_id): PromptLogprob(_finite(found.logprob), found.rank, found.decoded_token)
            for token_id, found in entry.items()
        }
        for entry in entries
    ]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
