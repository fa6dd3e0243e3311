"""One engine, many callers: threads take turns, and a caller who leaves takes its requests along."""

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from octavo.engine.engine import Engine
from octavo.engine.prompts import Prompt, TokenIds
from octavo.engine.stats import EngineStats
from octavo.errors import EngineError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

Found = TypeVar("Found")

# Long enough for a thread that waits for the lock to wake up and take it.
_COURTESY_S = 50e-6


class SharedEngine:
    """Guards an engine, so that any thread may call it.

        thread 1   | lock: step |            | lock: step | ...
        thread 2                | lock: step |

    Whoever holds the lock runs a step for all. Outputs are read under the lock only.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._holder = 0
        # Threads that wait for the lock. May name one too many after an interrupt, which costs a short sleep.
        self._waiting: dict[int, None] = {}
        # Requests of callers who left. Appended to without the lock: a caller may be dropped anywhere.
        self._left: deque[str] = deque()

    def caller(self) -> "Caller":
        """Return a new caller, who has no requests yet."""
        return Caller(self)

    def call(self, act: Callable[[], Found]) -> Found:
        """Call a function while no other thread uses the engine.

        Raises:
            EngineError: this thread uses it already: a signal handler or a callback came in between.
        """
        me = threading.get_ident()
        if self._holder == me and self._lock.locked():
            raise EngineError(
                "the engine was called while it works in this thread, by a signal handler perhaps"
            )
        self._waiting[me] = None
        with self._lock:
            self._waiting.pop(me, None)
            self._holder = me
            try:
                self.engine.settle()
                while self._left:
                    self.engine.abort(self._left[0])
                    self._left.popleft()
                return act()
            finally:
                self._holder = 0

    def run_until(self, find: Callable[[], Found]) -> Found:
        """Run steps until `find`, which is called between them, returns something true; returns that."""

        def step() -> Found:
            found = find()
            if not found:
                if not self.engine.has_unfinished_requests:
                    raise EngineError("the engine has nothing to do, and a caller still waits")
                self.engine.step()
                found = find()
            return found

        while True:
            found = self.call(step)
            if self._waiting:
                time.sleep(_COURTESY_S)
            if found:
                return found

    def step(self) -> None:
        """Run one step."""
        self.call(self.engine.step)

    def abort(self, request_id: str) -> None:
        """As Engine.abort."""
        self.call(lambda: self.engine.abort(request_id))

    def reset_prefix_cache(self) -> int:
        """As Engine.reset_prefix_cache."""
        return self.call(self.engine.reset_prefix_cache)

    def stats(self) -> EngineStats:
        """As Engine.stats."""
        return self.call(self.engine.stats)

    def leave(self, request_ids: list[str]) -> None:
        """Have requests aborted before anything else is done. Takes no lock, for finalizers."""
        self._left.extend(request_ids)


class Caller:
    """Someone who has requests. When it is closed or dropped, those that are unfinished are aborted.

    The id of a request is noted before the engine has the request, so that none is lost in between.
    """

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._request_ids: list[str] = []

    def add(
        self,
        prompt: Prompt | TokenIds,
        params: SamplingParams,
        *,
        cache_salt: str = "",
        prompt_logprobs_start: int | None = None,
    ) -> RequestOutput:
        """As Engine.add_request."""
        engine = self._shared.engine

        def add() -> RequestOutput:
            request_id = engine.new_request_id()
            self._request_ids.append(request_id)
            return engine.add_request(
                prompt,
                params,
                request_id=request_id,
                cache_salt=cache_salt,
                prompt_logprobs_start=prompt_logprobs_start,
            )

        return self._shared.call(add)

    def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        if self._request_ids:
            self._shared.leave(self._request_ids)
            self._request_ids = []
            self._shared.call(lambda: None)

    def __enter__(self) -> "Caller":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._shared.leave(self._request_ids)
