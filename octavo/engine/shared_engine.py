"""One engine, many callers: threads take turns, and the requests of a caller that leaves are aborted."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from octavo.engine.engine import Engine
from octavo.engine.prompt_reader import Prompt, TokenIds
from octavo.errors import EngineError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

Found = TypeVar("Found")

# A released lock goes to the thread that asks first, which would be this one again. So it sleeps this long: a
# thread that waits for the lock wakes up and takes it.
_COURTESY_S = 50e-6


class SharedEngine:
    """An engine behind a lock, so that any thread may call it.

        thread 1   | lock: step |            | lock: step | ...
        thread 2                | lock: step |

    The thread that holds the lock runs a step for all. Outputs are read under the lock only.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._holder = 0
        # Threads that wait for the lock. An interrupt may leave one too many, which costs a short sleep.
        self._waiting: dict[int, None] = {}
        # Keeps the weak references to callers alive, by id(): without its caller a reference has no hash.
        self._present: dict[int, _Requests] = {}
        # Requests of callers that are gone: the next thread that takes the lock aborts them.
        self._orphans: deque[_Requests] = deque()

    def caller(self) -> "Caller":
        """Return a new caller, who has no requests yet."""
        caller = Caller(self)
        # A caller may be dropped anywhere, even inside this class, and a signal may come at once: so the
        # reference's callback is no Python code, which a signal could interrupt, but the deque's own method.
        caller.requests = _Requests(caller, self._orphans.append)
        self._present[id(caller.requests)] = caller.requests
        return caller

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
            # No call comes before this line: a signal handler that ran there would wait for its own thread.
            self._holder = me
            try:
                self._waiting.pop(me, None)
                self.engine.settle()
                self._abort_orphans()
                return act()
            finally:
                self._holder = 0

    def run_until(self, find: Callable[[], Found]) -> Found:
        """Run steps until `find`, called between them, returns something true; return that.

        Between steps other threads may add requests, for as long as the engine can spare.
        """

        def step() -> tuple[Found, float]:
            found = find()
            if found:
                return found, 0.0
            if not self.engine.has_unfinished_requests:
                raise EngineError("the engine has nothing to do, and a caller still waits")
            if spare_s := self.engine.spare_s:
                return found, spare_s
            self.engine.step()
            return find(), 0.0

        while True:
            found, spare_s = self.call(step)
            if found:
                return found
            if spare_s or self._waiting:
                time.sleep(max(spare_s, _COURTESY_S))

    def leave(self, requests: "_Requests") -> None:
        """Abort a caller's unfinished requests."""
        self._orphans.append(requests)
        self.call(lambda: None)

    def _abort_orphans(self) -> None:
        while self._orphans:
            requests = self._orphans[0]
            for request_id in requests.ids:
                self.engine.abort(request_id)
            # A closed caller comes here again when it is dropped; its ids may be others' by then.
            requests.ids.clear()
            self._present.pop(id(requests), None)
            self._orphans.popleft()


class Caller:
    """A maker of requests, such as a call or a stream. Closing or dropping it aborts the unfinished ones.

    Attributes:
        requests: its own. An id is noted before the engine has the request, so that none is lost in between.
    """

    requests: "_Requests"

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared

    def add(
        self,
        prompt: Prompt | TokenIds,
        params: SamplingParams,
        *,
        cache_salt: str = "",
        prompt_logprobs_start: int | None = None,
        read_along: bool = True,
    ) -> RequestOutput:
        """See Engine.add_request."""
        engine = self._shared.engine
        engine.prompts.check_params(params)
        # Compiling takes a while; meanwhile other callers' steps go on.
        grammar = engine.grammars.of(params)

        def add() -> RequestOutput:
            request_id = engine.new_request_id()
            self.requests.ids.append(request_id)
            return engine.add_request(
                prompt,
                params,
                request_id=request_id,
                cache_salt=cache_salt,
                prompt_logprobs_start=prompt_logprobs_start,
                read_along=read_along,
                grammar=grammar,
            )

        return self._shared.call(add)

    def close(self) -> None:
        """Abort the unfinished requests. Idempotent."""
        self._shared.leave(self.requests)


class _Requests(weakref.ref[Caller]):
    """What a caller leaves behind: a reference that goes to the deque when the caller is gone.

    Attributes:
        ids: request ids.
    """

    __slots__ = ("ids",)

    def __init__(self, caller: Caller, callback: Callable[["_Requests"], None]) -> None:
        super().__init__(caller, callback)  # type: ignore[call-arg]
        self.ids: list[str] = []
