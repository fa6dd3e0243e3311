"""The thread in which rank 0 runs its share of each step.

What one rank begins, all ranks must finish: if rank 0 left a step halfway, the others would wait for it in a
collective. Python raises Ctrl-C, and whatever a signal handler raises, in the main thread, between any two
instructions. So rank 0's share runs in another thread, and the engine's caller only waits for it:

    caller        launch(step) ──► wait ──► KeyboardInterrupt ... ──► reset() ──► wait ──► goes on
    this thread        '──────────── the step, to its end ───────────── '── forget all ─'

The wait ends early when a rank is gone, even if this thread hangs in a collective for ever. All waiting is
done in SimpleQueue, which an interrupt never leaves locked.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from octavo.errors import OctavoError

Found = TypeVar("Found")

# What a function returned or raised. Several may be put there; the caller takes the first.
_Answer = SimpleQueue[tuple[Any, BaseException | None]]


class RankThread:
    """Runs functions one after the other.

    Attributes:
        error: why nothing runs any more, else None.
    """

    def __init__(self, name: str) -> None:
        self.error: OctavoError | None = None
        self._jobs: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        self._awaited: _Answer = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], Found]) -> Found:
        """Run a function after all earlier ones, and return what it returns or raise what it raises.

        Raises:
            OctavoError: `error`, now or before.
        """
        answer: _Answer = SimpleQueue()
        # It is set before the check, because `fail` sets the error before it looks for a waiting caller.
        self._awaited = answer
        if self.error is not None:
            raise _again(self.error)
        self._jobs.put((act, answer))
        found, error = answer.get()
        try:
            if error is not None:
                raise error
            return found
        finally:
            # The error's traceback refers to this frame.
            del error

    def post(self, act: Callable[[], object]) -> None:
        """Run a function after all earlier ones; nobody waits for it, and it must not raise."""
        self._jobs.put((act, SimpleQueue()))

    def fail(self, error: OctavoError) -> None:
        """Make the current call and all later ones raise. Any thread may call it."""
        self.error = error
        self._awaited.put((None, _again(error)))

    def stop(self) -> None:
        """End the thread once it has run all earlier functions."""
        self._jobs.put(None)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one function in a frame of its own, so that nothing it refers to outlives it."""
        job = self._jobs.get()
        if job is None:
            return False
        act, answer = job
        try:
            answer.put((act(), None))
        except BaseException as error:
            # After `fail` nobody takes it, and it would keep alive what its frames refer to.
            if self.error is None:
                answer.put((None, error))
        return True


def _again(error: OctavoError) -> OctavoError:
    """Return an equal error: each raise adds to an error's traceback."""
    return type(error)(str(error))
