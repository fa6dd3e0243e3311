"""What a reader has not seen yet of an output that grows."""

from octavo.outputs import CompletionDelta, CompletionOutput, RequestOutput


class DeltaReader:
    """Reads one output piece by piece; the pieces of a completion concatenate to the whole.

    Nothing is kept for readers: a piece is cut from the output when it is asked for, however many steps have
    added to it since the last one.
    """

    def __init__(self, output: RequestOutput) -> None:
        self._output = output
        # Of each completion: tokens seen, characters seen, the end seen.
        self._seen = [(0, 0, False) for _ in output.outputs]

    def read(self) -> list[CompletionDelta]:
        """Return what is new: at most one delta of each completion, the last one of all with the output."""
        deltas = []
        for index, completion in enumerate(self._output.outputs):
            ended = completion.finish_reason is not None
            now = (len(completion.token_ids), len(completion.text), ended)
            if now != self._seen[index]:
                deltas.append(self._cut(completion, *self._seen[index]))
                self._seen[index] = now
        if deltas and self._output.finished:
            deltas[-1].output = self._output
        return deltas

    def _cut(
        self, completion: CompletionOutput, num_tokens: int, num_chars: int, ended: bool
    ) -> CompletionDelta:
        logprobs = completion.logprobs
        return CompletionDelta(
            request_id=self._output.request_id,
            index=completion.index,
            text=completion.text[num_chars:],
            token_ids=tuple(completion.token_ids[num_tokens:]),
            logprobs=None if logprobs is None else tuple(logprobs[num_tokens:]),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            message=completion.message,
        )
