"""Converts an answer's pieces to the items of /v1/responses, and to the events that announce them."""

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from octavo.outputs import CompletionOutput
from octavo.server.api.anthropic.signature import signed
from octavo.server.api.responses.response_structs import (
    CustomCallItem,
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)
from octavo.server.api.responses.response_tools import Names
from octavo.server.api.tools.toolbox import Toolbox
from octavo.server.parsing.answer import AnswerReader, Reader, read_pieces
from octavo.server.parsing.piece import Piece


class OutputWriter:
    """Builds the items of /v1/responses from the pieces of an answer.

    Attributes:
        items: those so far; the last one may be unfinished.
    """

    def __init__(
        self,
        new_call_id: Callable[[], str],
        *,
        parallel: bool,
        names: Names | None = None,
        seals: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        """Start at the beginning of an answer.

        Args:
            new_call_id: returns an id for a call.
            parallel: give all calls, not only the first.
            names: namespaces and names of tools, by the names that the model knows.
            seals: reasoning gets an encrypted_content, which brings it back.
            shows_reasoning: otherwise it becomes no item.
        """
        self._shows_reasoning = shows_reasoning
        self._names = names or {}
        self._seals = seals
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
            if piece.kind in ("call", "custom", "arguments", "input", "complete"):
                self._write_call(piece, events)
            elif piece.kind != "reasoning" or self._shows_reasoning:
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
        if piece.kind in ("call", "custom"):
            self._is_skipping = self._has_call and not self._parallel
        if self._is_skipping:
            return
        if piece.kind in ("call", "custom"):
            self._close("completed", events)
            self._open(self._call(piece), events)
        elif piece.kind in ("arguments", "input"):
            self._texts.append(piece.text)
            kind = "function_call_arguments" if piece.kind == "arguments" else "custom_tool_call_input"
            events.append(self._event(f"response.{kind}.delta", delta=piece.text))
        else:
            self._has_call = True
            self._close("completed", events)

    def _call(self, piece: Piece) -> OutputItem:
        namespace, name = self._names.get(piece.text, (None, piece.text))
        fields: dict[str, Any] = {"status": "in_progress", "call_id": self._new_call_id(), "name": name}
        if namespace is not None:
            fields["namespace"] = namespace
        if piece.kind == "custom":
            return CustomCallItem(id=_id("ctc"), input="", **fields)
        return FunctionCallItem(id=_id("fc"), arguments="", **fields)

    def _open(self, item: OutputItem, events: list[ResponseEvent]) -> None:
        self.items.append(item)
        self._is_open, self._texts = True, []
        events.append(self._event("response.output_item.added", item=item))
        if isinstance(item, OutputMessage | ReasoningItem):
            part = OutputText(text="") if isinstance(item, OutputMessage) else ReasoningText(text="")
            events.append(self._event("response.content_part.added", content_index=0, part=part))

    def _close(self, status: str, events: list[ResponseEvent]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        # This is a copy, because earlier events with the item may not have been written yet.
        if isinstance(item, FunctionCallItem):
            done = replace(item, status=status, arguments=text)
            ended = {"arguments": text, "name": item.name}
            events.append(self._event("response.function_call_arguments.done", **ended))
        elif isinstance(item, CustomCallItem):
            done = replace(item, status=status, input=text)
            events.append(self._event("response.custom_tool_call_input.done", input=text))
        elif isinstance(item, ReasoningItem):
            part, sealed = ReasoningText(text=text), signed(text, carries=True) if self._seals else UNSET
            done = replace(item, status=status, content=[part], encrypted_content=sealed)
            events.append(self._event("response.reasoning_text.done", content_index=0, text=text))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        else:
            part = OutputText(text=text)
            done = replace(item, status=status, content=[part])
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


def new_writer(box: Toolbox, **options: Any) -> tuple[Reader, OutputWriter]:
    """Return what divides an answer's text, and what makes items of its pieces, with options of its own."""
    reader = box.reader() or AnswerReader(None, None)
    return reader, OutputWriter(reader.new_id, parallel=box.parallel, **options)


def whole_items(box: Toolbox, completion: CompletionOutput, status: str, **options: Any) -> list[OutputItem]:
    """Return the items of a whole answer; `status` is the last one's, `options` are the writer's."""
    reader, writer = new_writer(box, **options)
    writer.write(read_pieces(reader, completion.text, completion.token_ids))
    writer.finish(status)
    return writer.items


def _message() -> OutputMessage:
    return OutputMessage(id=_id("msg"), status="in_progress", content=[])


def _reasoning() -> ReasoningItem:
    return ReasoningItem(id=_id("rs"), status="in_progress", content=[])


def _id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
