"""Converts an answer's pieces to the items of /v1/responses, and to the events that announce them."""

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from octavo.outputs import CompletionOutput
from octavo.server.api.responses.response_structs import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)
from octavo.server.api.toolbox import Toolbox
from octavo.server.parsing.answer import AnswerReader, Reader, read_pieces
from octavo.server.parsing.piece import Piece


class OutputWriter:
    """Builds the items of /v1/responses from the pieces of an answer.

    Attributes:
        items: those so far; the last one may be unfinished.
    """

    def __init__(self, new_call_id: Callable[[], str], *, parallel: bool) -> None:
        """Start at the beginning of an answer.

        Args:
            new_call_id: returns an id for a call.
            parallel: give all calls, not only the first.
        """
        self.items: list[OutputItem] = []
        self._new_call_id = new_call_id
        self._parallel = parallel
        self._is_open = False
        self._has_call = self._is_skipping = False
        self._texts: list[str] = []

    def write(self, pieces: Iterable[Piece]) -> list[ResponseEvent]:
        """Add pieces; return the events that announce them."""
        events: list[ResponseEvent] = []
        for piece in pieces:
            if piece.kind in ("call", "arguments", "complete"):
                self._write_call(piece, events)
            else:
                self._write_text(piece, events)
        return events

    def finish(self, status: str) -> list[ResponseEvent]:
        """End the last item; an empty answer becomes an empty message.

        Args:
            status: completed or incomplete.
        """
        events: list[ResponseEvent] = []
        if not self.items:
            self._open(_message(), events)
        self._close(status, events)
        return events

    def _write_text(self, piece: Piece, events: list[ResponseEvent]) -> None:
        kind = ReasoningItem if piece.kind == "reasoning" else OutputMessage
        if not (self._is_open and isinstance(self.items[-1], kind)):
            self._close("incomplete" if piece.kind == "broken" else "completed", events)
            self._open(_reasoning() if kind is ReasoningItem else _message(), events)
        self._texts.append(piece.text)
        self._is_skipping = False
        if kind is ReasoningItem:
            events.append(self._event("response.reasoning_text.delta", content_index=0, delta=piece.text))
        else:
            delta = {"content_index": 0, "delta": piece.text, "logprobs": []}
            events.append(self._event("response.output_text.delta", **delta))

    def _write_call(self, piece: Piece, events: list[ResponseEvent]) -> None:
        if piece.kind == "call":
            self._is_skipping = self._has_call and not self._parallel
        if self._is_skipping:
            return
        if piece.kind == "call":
            self._close("completed", events)
            call_id = self._new_call_id()
            item = FunctionCallItem(
                id=_id("fc"), status="in_progress", call_id=call_id, name=piece.text, arguments=""
            )
            self._open(item, events)
        elif piece.kind == "arguments":
            self._texts.append(piece.text)
            events.append(self._event("response.function_call_arguments.delta", delta=piece.text))
        else:
            self._has_call = True
            self._close("completed", events)

    def _open(self, item: OutputItem, events: list[ResponseEvent]) -> None:
        self.items.append(item)
        self._is_open, self._texts = True, []
        events.append(self._event("response.output_item.added", item=item))
        if isinstance(item, OutputMessage):
            part = OutputText(text="")
            events.append(self._event("response.content_part.added", content_index=0, part=part))

    def _close(self, status: str, events: list[ResponseEvent]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        # This is a copy, because earlier events with the item may not have been written yet.
        if isinstance(item, FunctionCallItem):
            done = FunctionCallItem(
                id=item.id, status=status, call_id=item.call_id, name=item.name, arguments=text
            )
            ended = {"arguments": text, "name": item.name}
            events.append(self._event("response.function_call_arguments.done", **ended))
        elif isinstance(item, ReasoningItem):
            done = ReasoningItem(id=item.id, status=status, content=[ReasoningText(text=text)])
            events.append(self._event("response.reasoning_text.done", content_index=0, text=text))
        else:
            part = OutputText(text=text)
            done = OutputMessage(id=item.id, status=status, content=[part])
            ended = {"content_index": 0, "text": text, "logprobs": []}
            events.append(self._event("response.output_text.done", **ended))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        self.items[-1] = done
        events.append(self._event("response.output_item.done", item=done))

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, output_index=len(self.items) - 1, **fields)
        if "item" not in fields:
            event.item_id = self.items[-1].id
        return event


def new_writer(box: Toolbox) -> tuple[Reader, OutputWriter]:
    """Return what divides an answer's text, and what makes items of its pieces."""
    reader = box.reader() or AnswerReader(None, None)
    return reader, OutputWriter(reader.new_id, parallel=box.parallel)


def whole_items(box: Toolbox, completion: CompletionOutput, status: str) -> list[OutputItem]:
    """Return the items of a whole answer; `status` is the last one's."""
    reader, writer = new_writer(box)
    writer.write(read_pieces(reader, completion.text, completion.token_ids))
    writer.finish(status)
    return writer.items


def _message() -> OutputMessage:
    return OutputMessage(id=_id("msg"), status="in_progress", content=[])


def _reasoning() -> ReasoningItem:
    return ReasoningItem(id=_id("rs"), status="in_progress", content=[])


def _id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
