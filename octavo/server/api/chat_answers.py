"""Converts a model's text to messages, whole or delta by delta."""

from collections.abc import Sequence

from msgspec import UNSET

from octavo.outputs import CompletionOutput, FinishReason
from octavo.server.api.structs import (
    AnswerMessage,
    CalledCustom,
    CalledFunction,
    Delta,
    ToolCall,
    ToolCallDelta,
)
from octavo.server.parsing.answer import Answer, Call, Reader, read_answer
from octavo.server.parsing.piece import Piece


def whole_message(
    completion: CompletionOutput, reader: Reader | None, *, parallel: bool
) -> tuple[AnswerMessage, str]:
    """Return a completion's message and its finish_reason.

    Args:
        completion: finished.
        reader: divides its text; None: all is content.
        parallel: give all calls, not only the first.
    """
    answer = (
        Answer(completion.text)
        if reader is None
        else read_answer(reader, completion.text, completion.token_ids)
    )
    calls = answer.calls if parallel else answer.calls[:1]
    message = AnswerMessage(
        content=None if (calls or answer.reasoning) and not answer.content else answer.content,
        reasoning_content=answer.reasoning or UNSET,
        tool_calls=[_tool_call(call) for call in calls] or UNSET,
    )
    return message, finish_reason(completion.finish_reason or "abort", num_calls=len(calls))


def _tool_call(call: Call) -> ToolCall:
    if call.is_custom:
        return ToolCall(id=call.id, type="custom", custom=CalledCustom(name=call.name, input=call.arguments))
    return ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


def finish_reason(reason: FinishReason, *, num_calls: int) -> str:
    """Return why an answer ended, as clients know it."""
    return "tool_calls" if reason == "stop" and num_calls else reason


class DeltaWriter:
    """Turns one answer's text into deltas."""

    def __init__(self, reader: Reader | None, *, parallel: bool) -> None:
        """Start at the beginning of an answer; arguments as for `whole_message`."""
        self._reader = reader
        self._parallel = parallel
        self._num_begun = self._num_complete = 0
        self._is_skipping = False

    def write(
        self, text: str, token_ids: Sequence[int], reason: FinishReason | None
    ) -> tuple[Delta, str | None]:
        """Return what is new for the client, and why the answer ended if it did."""
        reader = self._reader
        if reader is None:
            return Delta(content=text), reason
        pieces = reader.feed(text, token_ids)
        if reason is None:
            return self._delta(pieces), None
        return self._delta(pieces + reader.finish()), finish_reason(reason, num_calls=reader.num_calls)

    def _delta(self, pieces: list[Piece]) -> Delta:
        delta = Delta()
        calls: dict[int, ToolCallDelta] = {}
        for piece in pieces:
            if piece.kind in ("content", "broken"):
                delta.content = (delta.content or "") + piece.text
            elif piece.kind == "reasoning":
                delta.reasoning_content = (delta.reasoning_content or "") + piece.text
            else:
                self._add(calls, piece)
        if calls:
            delta.tool_calls = list(calls.values())
        return delta

    def _add(self, calls: dict[int, ToolCallDelta], piece: Piece) -> None:
        assert self._reader is not None
        if piece.kind in ("call", "custom"):
            # A call that broke off is none, so that the next one is the first.
            self._is_skipping = self._num_complete > 0 and not self._parallel
            self._num_begun += not self._is_skipping
        if self._is_skipping:
            return
        index = self._num_begun - 1
        self._num_complete += piece.kind == "complete"
        if piece.kind == "call":
            function = CalledFunction(name=piece.text, arguments="")
            calls[index] = ToolCallDelta(
                index=index, id=self._reader.new_id(), type="function", function=function
            )
        elif piece.kind == "custom":
            calls[index] = ToolCallDelta(
                index=index,
                id=self._reader.new_id(),
                type="custom",
                custom=CalledCustom(name=piece.text, input=""),
            )
        elif piece.kind == "arguments":
            call = calls.setdefault(index, ToolCallDelta(index=index, function=CalledFunction(arguments="")))
            assert call.function
            call.function.arguments += piece.text
        elif piece.kind == "input":
            call = calls.setdefault(index, ToolCallDelta(index=index, custom=CalledCustom(input="")))
            assert call.custom
            call.custom.input += piece.text


def is_empty(delta: Delta) -> bool:
    """Return whether a client would see nothing in it."""
    return not (delta.content or delta.reasoning_content or delta.tool_calls)
