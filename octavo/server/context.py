"""What all endpoints share: the engine, the options, a pool for slow work, counters."""

import asyncio
import functools
import importlib
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.engine.engine import Engine
from octavo.engine.prompts import TokenIds
from octavo.errors import EngineDeadError, NotReadyError
from octavo.sampling_params import SamplingParams
from octavo.server.api.sse import EventStream, EventWriter
from octavo.server.api.types import RequestId
from octavo.server.auth import isolated_salt
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.generation import Generation
from octavo.server.limits import BodyReader
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.metrics import Metrics
from octavo.server.parsing.formats import ModelFormats, formats_of
from octavo.server.replicas.told import note_prompts
from octavo.server.tracing import Traces, note_generation

Found = TypeVar("Found")

# The version of the package that runs, which need not be installed.
VERSION: str = importlib.import_module("octavo").__version__

# Rendering and tokenizing release the interpreter's lock.
_POOL_THREADS = 4


class Context:
    """What the endpoints of one server share.

    Attributes:
        loop: runs the engine.
        config: the options.
        model: the name clients give.
        created: when the server started, seconds since 1970.
        bodies: reads requests.
        metrics: counts them.
        num_restarts: processes before this one whose engine died.
        traces: makes spans, or None.

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
        endpoint = config.otlp_traces_endpoint
        self.traces = None if endpoint is None else Traces(endpoint, model)
        self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="octavo-read")

    async def run(self, work: Callable[..., Found], *arguments: object) -> Found:
        """Run slow work in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

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
            ApiError, ClientGoneError: as BodyReader.read.
        """
        headers, check = request.scope["headers"], functools.partial(self.loop.check_room, 1)
        return await self.bodies.read(headers, request.receive, before_small=check)

    @functools.cached_property
    def formats(self) -> ModelFormats:
        """How the model writes calls and reasoning. Raises as `engine` does."""
        return formats_of(self.engine.tokenizer, self.config.tool_call_parser, self.config.reasoning_parser)

    def check_model(self, model: str | None) -> None:
        """Refuse another model's name.

        Raises:
            ApiError: 404.
        """
        if model is not None and model != self.model:
            text = f"there is no model {model[:200]!r} here, only {self.model!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    def salt(self, request: Request, cache_salt: str | None) -> str:
        """Return the salt under which a request finds cached prefixes."""
        holder = request.scope["octavo.holder"]
        if self.config.cache_isolation == "key" and holder is not None:
            return isolated_salt(holder, cache_salt or "")
        return cache_salt or ""

    async def generate(
        self, prompts: Sequence[TokenIds], params: SamplingParams, *, cache_salt: str, priority: int
    ) -> Generation:
        """Submit prompts: all of them or none.

        Raises:
            OctavoError: as EngineLoop.submit.
        """
        self.metrics.note_params(params)
        generation = Generation(prompts)
        try:
            for prompt in prompts:
                stream = await self.loop.submit(
                    prompt, params, request_id=uuid.uuid4().hex, cache_salt=cache_salt, priority=priority
                )
                generation.streams.append(stream)
        except BaseException:
            generation.abort()
            raise
        note_prompts(prompts, cache_salt)
        generation.watch_queue(self.config.queue_timeout_s)
        note_generation(generation, params)
        return generation

    def events(self, writer: EventWriter, generation: Generation, **options: Any) -> EventStream:
        """Return an answer that streams events; see EventStream."""
        return EventStream(
            writer,
            generation,
            keep_alive_s=self.config.sse_keep_alive_s,
            write_timeout_s=self.config.write_timeout_s,
            **options,
        )

    def close(self) -> None:
        """Let the pool's threads end, and send the last spans."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()


def new_id(prefix: str, request: Request, given: RequestId | None) -> str:
    """Return the id of an answer, made from the client's request id if it gave one."""
    return f"{prefix}-{given or request.scope['octavo.request_id']}"
