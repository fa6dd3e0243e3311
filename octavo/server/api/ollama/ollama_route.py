"""POST /api/chat and /api/generate: answers in Ollama's form, whole or line by line."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotReadyError
from octavo.outputs import CompletionDelta, CompletionOutput, RequestOutput
from octavo.server.api.logprobs import LogprobWriter, check_logprobs
from octavo.server.api.ollama.ollama_input import OllamaInput
from octavo.server.api.ollama.ollama_structs import Call, FunctionOfCall, Line, SaidMessage, counts_of, now
from octavo.server.api.sse import EventWriter, encode, json_response
from octavo.server.api_errors import ollama_error
from octavo.server.context import Context, note_left_out
from octavo.server.generation import Generation
from octavo.server.limits import while_present
from octavo.server.parsing.answer import Reader
from octavo.server.parsing.piece import Piece
from octavo.server.reading.forms import unpacked


@dataclass(frozen=True, slots=True)
class Answer:
    """Data for every line of an answer."""

    model: str
    is_chat: bool
    logprobs: LogprobWriter

    def line(self, said: SaidMessage, **fields: object) -> Line:
        """Return a line with what was said."""
        line = Line(model=self.model, created_at=now())
        if self.is_chat:
            line.message = said
        else:
            line.response, line.thinking = said.content, said.thinking
        return msgspec.structs.replace(line, **fields)

    def last(self, said: SaidMessage, output: RequestOutput) -> Line:
        """Return the last line.

        Raises:
            NotReadyError: the server is stopping and has aborted the answer.
        """
        reason = output.outputs[0].finish_reason
        if reason == "abort":
            raise NotReadyError("the server stops, and has broken off this answer")
        return self.line(said, done=True, done_reason=reason, **counts_of(output))

    def logprobs_of(self, part: CompletionDelta | CompletionOutput) -> object:
        """Return the field of log-probabilities of new tokens."""
        if part.logprobs is None:
            return UNSET
        return self.logprobs.chat(part.token_ids, part.logprobs).content


async def answer(context: Context, request: Request) -> Response:
    """Answer a conversation or a prompt."""
    body = await context.read_body(request)
    read, left_out = await while_present(request, context.read_apart(request, body))
    note_left_out(request, left_out)
    found = msgspec.msgpack.decode(read, type=OllamaInput)
    engine = context.engine
    told = Answer(context.model, found.is_chat, LogprobWriter(engine.tokenizer, found.params.logprobs or 0))
    if not found.prompt:
        return json_response(told.line(SaidMessage(), done=True, done_reason="load"))
    prompt = unpacked(found.prompt)
    reader = None if found.raw else found.tools.box(context.materials.formats).reader()
    check_logprobs([prompt], found.params, engine.prompts.max_model_len, num_copies=1)

    async def begin() -> Generation:
        salt = context.salt(request, None)
        return await context.generate([prompt], found.params, cache_salt=salt, priority=0)

    if found.stream:
        generation = await while_present(request, begin())
        return context.events(
            _Lines(told, generation, reader),
            generation,
            last=b"",
            idle=_line(told.line(SaidMessage())),
            write_error=lambda error: ollama_error(error) + b"\n",
            content_type=b"application/x-ndjson",
        )

    async def whole() -> Line:
        (output,) = await (await begin()).finish()
        # The text may be long, or made to be slow to parse.
        return await context.run(request, partial(_said_whole, told, output, reader))

    return json_response(await while_present(request, whole()))


def _line(line: Line) -> bytes:
    return encode(line) + b"\n"


def _said_whole(told: Answer, output: RequestOutput, reader: Reader | None) -> Line:
    completion, speech = output.outputs[0], _Speech(reader)
    speech.feed(completion.text, completion.token_ids)
    speech.finish()
    return msgspec.structs.replace(told.last(speech.take(), output), logprobs=told.logprobs_of(completion))


class _Speech:
    """What was said and has not been taken yet. A call is said when it is complete."""

    def __init__(self, reader: Reader | None) -> None:
        self._reader = reader
        self._said = SaidMessage()
        self._name = self._arguments = ""

    def feed(self, text: str, token_ids: Sequence[int]) -> None:
        """Take new text."""
        reader = self._reader
        self._add([Piece("content", text)] if reader is None else reader.feed(text, token_ids))

    def finish(self) -> None:
        """Take what the reader has held back."""
        if self._reader is not None:
            self._add(self._reader.finish())

    def take(self) -> SaidMessage:
        """Return what is new."""
        said, self._said = self._said, SaidMessage()
        return said

    def _add(self, pieces: Sequence[Piece]) -> None:
        said = self._said
        for piece in pieces:
            if piece.kind in ("content", "broken"):
                said.content += piece.text
            elif piece.kind == "reasoning":
                said.thinking = (said.thinking or "") + piece.text
            elif piece.kind == "call":
                self._name, self._arguments = piece.text, ""
            elif piece.kind == "arguments":
                self._arguments += piece.text
            elif piece.kind == "complete":
                arguments = msgspec.json.decode(self._arguments or "{}")
                call = Call(function=FunctionOfCall(name=self._name, arguments=arguments))
                said.tool_calls = [*(said.tool_calls or ()), call]


class _Lines(EventWriter):
    """Writes a streamed answer."""

    def __init__(self, told: Answer, generation: Generation, reader: Reader | None) -> None:
        self._told = told
        self._generation = generation
        self._speech = _Speech(reader)

    def write(self, position: int, deltas: list[CompletionDelta]) -> bytes:
        """Return a line for each delta in which there is something new."""
        written = []
        for delta in deltas:
            self._speech.feed(delta.text, delta.token_ids)
            said, logprobs = self._speech.take(), self._told.logprobs_of(delta)
            if said != SaidMessage() or logprobs:
                written.append(_line(self._told.line(said, logprobs=logprobs)))
        return b"".join(written)

    def finish(self) -> bytes:
        """Return what was held back, and the last line."""
        self._speech.finish()
        said = self._speech.take()
        held = b"" if said == SaidMessage() else _line(self._told.line(said))
        return held + _line(self._told.last(SaidMessage(), self._generation.outputs[0]))
