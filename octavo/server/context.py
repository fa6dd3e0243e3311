"""State shared by all endpoints: the engine, the options, a pool for slow work, counters."""

import asyncio
import functools
import importlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.engine import Engine
from octavo.engine.prompt_reader import POOLED, TokenIds
from octavo.errors import EngineDeadError, NotReadyError, QueueFullError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.api.pooled import pooled_input
from octavo.server.api.pooled.pooled_input import PooledInput
from octavo.server.api.prompt_tokens import Prompts
from octavo.server.api.responses.response_store import ResponseStore
from octavo.server.api.sampling import Defaults
from octavo.server.api.sse import EventStream, EventWriter, time_to_look
from octavo.server.api.structs import RequestId
from octavo.server.api_errors import ApiError
from octavo.server.config import ServerConfig
from octavo.server.entry.bodies import BodyReader
from octavo.server.entry.door import isolated_salt
from octavo.server.generation import Generation
from octavo.server.limits import Deadlines
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.loop.output_stream import Stream
from octavo.server.metrics import Metrics
from octavo.server.parsing.formats import ModelFormats, formats_of
from octavo.server.prefix_watch import PrefixWatch
from octavo.server.reading.fair_threads import FairThreads
from octavo.server.reading.forms import Outline, ReadAnswer, ReadChat, ReadPooled, ReadTexts, unpacked
from octavo.server.reading.kinds import ANSWERS, CHATS
from octavo.server.reading.processes import LONG_BYTES, ReadingProcesses
from octavo.server.reading.requests import ChatInput, Materials, TextInput
from octavo.server.replicas.reporting import note_prompts
from octavo.server.tracing import Traces, note_generation

logger = logging.getLogger("octavo.server")

if TYPE_CHECKING:
    from octavo.server.api.batches.runner import Runner

Found = TypeVar("Found")

# The version of the running package, which need not be installed.
VERSION: str = importlib.import_module("octavo").__version__

# Rendering and tokenizing release the interpreter's lock.
_POOL_THREADS = 4
# Seconds until a prompt that waits for room in the queue is submitted again.
_AGAIN_S = 0.05
# Most prompts of a request that wait or are pooled at a time.
_MOST_POOLED = 256


class Context:
    """State shared by the endpoints of one server.

    Attributes:
        loop: runs the engine.
        config: the options.
        model: the name clients give.
        created: when the server started, seconds since 1970.
        bodies: reads requests.
        metrics: counts them.
        store: keeps answers, or None.
        num_restarts: processes before this one whose engine died.
        traces: makes spans, or None.
        batches: runs batches, or None if there is no folder for them.

    Raises:
        ConfigError: traces need a library that is not installed.
    """

    def __init__(self, loop: EngineLoop, config: ServerConfig, model: str, num_restarts: int = 0) -> None:
        self.loop = loop
        self.config = config
        self.model = model
        self.created = int(time.time())
        self.bodies = BodyReader(config)
        self.metrics = Metrics(loop, model, num_restarts)
        self.num_restarts = num_restarts
        self.batches: Runner | None = None
        most = config.response_store_mib << 20
        self.store = ResponseStore(most, config.response_store_s) if most else None
        endpoint = config.otlp_traces_endpoint
        self.traces = None if endpoint is None else Traces(endpoint, model)
        self._numbers = itertools.count()
        self._queue_deadlines = Deadlines(config.queue_timeout_s)
        self._looks = Deadlines(time_to_look(config.sse_keep_alive_s, config.write_timeout_s))
        self._pool = FairThreads(_POOL_THREADS, "octavo-read")
        self._reading = ReadingProcesses(self._outline, self.bodies.room_bytes)

    async def run(self, request: Request, work: Callable[..., Found], *arguments: object) -> Found:
        """Run slow work for a request in the pool, whose threads the senders of requests use in turns."""
        return await self._pool.run(request.scope["octavo.sender"], work, *arguments)

    @property
    def engine(self) -> Engine:
        """The engine, which takes requests.

        Raises:
            NotReadyError: the server loads or drains, or the engine is dead and will be started again.
            EngineDeadError: the engine is dead.
        """
        state = self.loop.state
        if state == "dead" and self.config.restart:
            raise NotReadyError("the engine died and is being started again; try again in a few seconds")
        if state == "dead":
            raise EngineDeadError("the engine is dead")
        if state != "ready":
            raise NotReadyError(f"the server is {state}")
        return self.loop.engine

    async def read_body(self, request: Request) -> bytes:
        """Return the body of a request for completions, unless the queue is full.

        Raises:
            QueueFullError: no request could be queued now.
            InvalidArgumentError: the model generates no text.
            ApiError, ClientGoneError: as BodyReader.read.
        """
        check = functools.partial(self.loop.check_room, 1)
        body = await self.bodies.read(request.scope, request.receive, before_small=check)
        self.engine.prompts.check_generates()
        return body

    @property
    def materials(self) -> Materials:
        """Everything that is needed to read prompts. Raises as `engine` does."""
        prompts = Prompts(self.engine.prompts, is_canonical=self.config.canonical_prompts)
        return Materials(self.model, prompts, self._formats, self.defaults)

    @property
    def defaults(self) -> Defaults:
        """The model's values for what requests leave open. Raises as `engine` does."""
        return self.engine.sampling_defaults.values

    @functools.cached_property
    def watch(self) -> PrefixWatch:
        """Notices conversations that stop hitting the prefix cache. Needs the engine."""
        return PrefixWatch(self.loop.engine.tokenizer if self.config.log_prompt_excerpts else None)

    @functools.cached_property
    def _formats(self) -> ModelFormats:
        config = self.config
        return formats_of(self.loop.engine.tokenizer, config.tool_call_parser, config.reasoning_parser)

    def _outline(self) -> Outline:
        return Outline.of(
            self.model,
            self.loop.engine.prompts,
            self.config,
            self.loop.engine.sampling_defaults.values,
        )

    async def read_long_chat(self, request: Request, body: bytes) -> ChatInput:
        """Read a long body that asks for a chat in another process, which returns token ids.

        Raises:
            OctavoError, ApiError: as `engine` and ReadingProcesses.read.
        """
        materials, path = self.materials, self.path_of(request)
        self.loop.check_room(1)
        read = await self._reading.read(request.scope["octavo.sender"], path, body)
        assert isinstance(read, ReadChat)
        fields = msgspec.json.decode(read.fields, type=CHATS[path][0])
        prepared = unpacked(read.prompt), read.tools.box(materials.formats), read.constrained_params
        return ChatInput(fields, read.chat, read.params, read.left_out, prepared)

    async def read_long_texts(self, request: Request, body: bytes) -> TextInput:
        """Read a long body that asks for completions in the same way. Raises as `read_long_chat`."""
        _ = self.engine
        self.loop.check_room(1)
        read = await self._reading.read(request.scope["octavo.sender"], self.path_of(request), body)
        assert isinstance(read, ReadTexts)
        return TextInput(
            read.fields, read.params, read.left_out, [unpacked(prompt) for prompt in read.prompts]
        )

    async def read_pooled(self, request: Request) -> PooledInput:
        """Read a body whose prompts are pooled: in the pool, or if it is long in another process.

        Raises:
            OctavoError, ApiError: as `engine`, `read_body` and ReadingProcesses.read.
        """
        path, check = self.path_of(request), functools.partial(self.loop.check_room, 1)
        body = await self.bodies.read(request.scope, request.receive, before_small=check)
        self.engine.prompts.pooling_for()
        if len(body) <= LONG_BYTES:
            return await self.run(request, pooled_input.read_body, self.materials, path, body)
        read = await self._reading.read(request.scope["octavo.sender"], path, body)
        assert isinstance(read, ReadPooled)
        fields = msgspec.json.decode(read.fields, type=pooled_input.POOLED[path])
        return fields, [unpacked(prompt) for prompt in read.prompts], read.left_out

    async def pool(
        self, prompts: Sequence[TokenIds], *, cache_salt: str, priority: int
    ) -> list[RequestOutput]:
        """Pool prompts, as many at a time as the queue holds, and return their outputs in order.

        Equal prompts are pooled once, so that rounding does not tell them apart.

        Raises:
            OctavoError: as EngineLoop.submit.
        """
        outputs: list[RequestOutput] = []
        keys = [prompt.packed.tobytes() for prompt in prompts]
        unique = dict(zip(keys, prompts, strict=True))
        left = [*unique.values()]
        while left:
            num_tokens = itertools.accumulate(len(prompt.listed) for prompt in left)
            fits = sum(1 for total in num_tokens if total <= self.config.max_num_queued_tokens)
            num = max(1, min(fits, self.config.max_num_queued_reqs, _MOST_POOLED))
            wave, left = left[:num], left[num:]
            generation = await self.generate(
                wave, POOLED, cache_salt=cache_salt, priority=priority, waits=bool(outputs)
            )
            outputs += await generation.finish()
        by_key = dict(zip(unique, outputs, strict=True))
        return [by_key[key] for key in keys]

    async def answer(self, request: Request) -> Response:
        """Answer a body by what is read in it.

        Raises:
            OctavoError, ApiError: as `read_apart` and BodyReader.read.
        """
        body = await self.bodies.read(request.scope, request.receive)
        answer, left_out = await self.read_apart(request, body)
        note_left_out(request, left_out)
        return Response(answer, media_type="application/json")

    async def read_apart(self, request: Request, body: bytes) -> tuple[bytes, Sequence[str]]:
        """Return what ANSWERS makes of a body: in the pool, or if it is long in another process.

        Raises:
            OctavoError, ApiError: as `engine`, and as what reads the body.
        """
        path, materials = self.path_of(request), self.materials
        if len(body) <= LONG_BYTES:
            return await self.run(request, ANSWERS[path], materials, body)
        read = await self._reading.read(request.scope["octavo.sender"], path, body)
        assert isinstance(read, ReadAnswer)
        return read.body, read.left_out

    def path_of(self, request: Request) -> str:
        """Return a request's path without the prefix of all routes."""
        return request.scope["path"].removeprefix(self.config.root_path)

    def salt(self, request: Request, cache_salt: str | None) -> str:
        """Return the salt under which a request finds cached prefixes."""
        holder = request.scope["octavo.holder"]
        if self.config.cache_isolation == "key" and holder is not None:
            return isolated_salt(holder, cache_salt or "")
        return cache_salt or ""

    def check_room(self, num_completions: int) -> None:
        """Check that a request for so many completions could be queued now.

        Raises:
            ApiError: 400, it never can be.
            QueueFullError: not now.
        """
        most = self.config.max_num_queued_reqs
        if num_completions > most:
            raise ApiError(
                400,
                f"n times the number of prompts is {num_completions}, and the queue never holds more than "
                f"{most}; ask for fewer at a time, or give the server a larger max_num_queued_reqs",
                param="n",
                code="too_many_completions",
            )
        self.loop.check_room(num_completions)

    def _check_tokens(self, prompts: Sequence[TokenIds]) -> None:
        most = self.config.max_num_queued_tokens
        num_tokens = sum(len(prompt.listed) for prompt in prompts)
        # A single prompt of any length is let into an empty queue.
        if len(prompts) > 1 and num_tokens > most:
            raise ApiError(
                400,
                f"the prompts have {num_tokens} tokens, and the queue never holds more than {most}; send "
                "them one by one, or give the server a larger max_num_queued_tokens",
                param="prompt",
                code="too_many_tokens",
            )

    async def generate(
        self,
        prompts: Sequence[TokenIds],
        params: SamplingParams,
        *,
        cache_salt: str,
        priority: int,
        keep_cached: bool = False,
        prompt_logprobs_start: int | None = None,
        num_shared: int = 0,
        waits: bool = False,
    ) -> Generation:
        """Submit prompts: all of them or none.

        Args:
            prompts: token ids of each.
            params: how to continue them.
            cache_salt, priority, prompt_logprobs_start: as in EngineLoop.submit.
            num_shared: likewise.
            waits: a part of the same work has been let in, so these prompts wait for room, and for any time.

        Raises:
            OctavoError: as EngineLoop.submit.
            ApiError: 400, together they are more than the queue ever holds.
        """
        self._check_tokens(prompts)
        self.metrics.note_params(params)
        generation = Generation(prompts)
        try:
            for prompt in prompts:
                submit = functools.partial(
                    self.loop.submit,
                    prompt,
                    params,
                    request_id=f"http-{next(self._numbers)}",
                    cache_salt=cache_salt,
                    priority=priority,
                    keep_cached=keep_cached,
                    read_along=prompt_logprobs_start is None and params is not POOLED,
                    prompt_logprobs_start=prompt_logprobs_start,
                    num_shared=num_shared,
                )
                generation.streams.append(await (_when_there_is_room(submit) if waits else submit()))
        except BaseException:
            generation.abort()
            raise
        note_prompts(prompts, cache_salt)
        if self.config.queue_timeout_s and not waits:
            generation.watch_queue(self._queue_deadlines)
        note_generation(generation, params)
        return generation

    def events(self, writer: EventWriter, generation: Generation, **options: Any) -> EventStream:
        """Return an answer that streams events; see EventStream."""
        return EventStream(
            writer,
            generation,
            keep_alive_s=self.config.sse_keep_alive_s,
            write_timeout_s=self.config.write_timeout_s,
            looks=self._looks,
            **options,
        )

    def get_ready(self) -> None:
        """Begin to start what long bodies would wait for, once the engine is ready."""
        self._reading.start()
        if self.batches is not None:
            self.batches.wake()

    def stop_batches(self) -> None:
        """Break off the batch that is under way; it goes on when the server starts again. Idempotent."""
        if self.batches is not None:
            self.batches.close()

    def close(self) -> None:
        """Let the pool's threads and the processes that read end, and send the last spans."""
        self._pool.close()
        self._reading.close()
        self.stop_batches()
        if self.traces is not None:
            self.traces.close()


async def _when_there_is_room(submit: Callable[[], Awaitable[Stream]]) -> Stream:
    while True:
        try:
            return await submit()
        except QueueFullError:
            await asyncio.sleep(_AGAIN_S)


def note_left_out(request: Request, names: Sequence[str]) -> None:
    """Tell a client in its answer's headers, and the log, which parts of its body have no effect."""
    if names:
        request.scope["octavo.left_out"] = ", ".join(names)
        logger.debug("left out of a request to %s: %s", request.scope["path"], ", ".join(names))


def new_id(prefix: str, request: Request, client_id: RequestId | None) -> str:
    """Return the id of an answer, made from the client's request id if it gave one."""
    return f"{prefix}-{client_id or request.scope['octavo.request_id']}"
