"""The replica's side of routing: it records the marks of its prompts and reports which are cached."""

from collections.abc import Sequence
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.engine.prompt_reader import TokenIds
from octavo.engine.request_maker import salt_bytes
from octavo.router import Ledger, Marks, Report
from octavo.router.ledger import REPORT_PATH
from octavo.router.marks import CLIENT_HEADER, HEADER
from octavo.server.loop.engine_loop import EngineLoop

_current: ContextVar[tuple["ReportingApp", Marks] | None] = ContextVar("octavo-marks", default=None)


def note_prompts(prompts: Sequence[TokenIds], cache_salt: str) -> None:
    """Record the prompt of the current task's request, if a router sent it."""
    found = _current.get()
    if found is not None:
        app, marks = found
        app.note(marks, prompts[0], cache_salt)


class ReportingApp:
    """The server's application, which also reads marks and answers the router's polls for reports."""

    def __init__(self, app: ASGIApp, loop: EngineLoop) -> None:
        self._app = app
        self._loop = loop
        self._ledger = Ledger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # The front strips these headers from clients' requests, so only the front can send them.
        headers = dict(scope.get("headers", ()))
        marks = headers.get(HEADER)
        if marks is not None and scope["path"] == REPORT_PATH:
            return await self._tell(send)
        if CLIENT_HEADER in headers:
            scope["client"] = (headers[CLIENT_HEADER].decode("latin-1"), 0)
        token = _current.set(None if marks is None else (self, Marks.from_header(marks)))
        try:
            await self._app(scope, receive, send)
        finally:
            _current.reset(token)

    def note(self, marks: Marks, prompt: TokenIds, cache_salt: str) -> None:
        """Record a submitted prompt."""
        engine = self._loop.engine
        if engine.config.enable_prefix_caching:
            self._ledger.note(marks, prompt.packed, salt_bytes(cache_salt), engine.plan.block_size)

    def report(self) -> Report:
        """Return the current report. Works in any state and takes less than a millisecond."""
        stats = self._loop.stats()
        if stats.engine is None:
            return Report(self._loop.state)
        engine = self._loop.engine
        # The engine's thread may change this dict meanwhile; the next report catches up.
        digests, tokens = self._ledger.cached_marks(engine.manager.store.tree.has_digest)
        free_blocks = stats.engine.kv.num_free + stats.engine.kv.num_cached
        return Report(
            # A replica with a silent rank gets no requests.
            "stalled" if self._loop.has_late_rank else self._loop.state,
            digests,
            tokens,
            free_tokens=engine.plan.layout.num_tokens(free_blocks),
            num_running=stats.engine.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_tokens=stats.num_waiting_tokens,
            bytes_per_token=self._ledger.bytes_per_token,
        )

    async def _tell(self, send: Send) -> None:
        headers = [(b"content-type", b"application/msgpack")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.report().encode()})
