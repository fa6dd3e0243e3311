"""Calls a function that may take too long or recurse too deep, such as a compiler of grammars."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from octavo.errors import StructuredOutputError

Result = TypeVar("Result")

DEADLINE_S = 2.0
"""A grammar that takes longer to compile is refused."""
MAX_RUNNING = 4
# Compilers walk chains of references by recursion, and a process dies if its stack ends: 64 KiB of grammar
# fit some 8,000 links of 10 KB each. Memory of a stack that is not used costs nothing.
_STACK_BYTES = 256 * 2**20
# The size of new threads' stacks is the whole process's.
_STACK_SIZE = threading.Lock()


class _Job(Generic[Result]):
    """One call that may take too long.

    Attributes:
        outcome: the result or the error, once there is one. Code in Rust may panic, which is no Exception.
        is_running: it got a place.
        is_given_up: nobody waits any more.
    """

    def __init__(self, act: Callable[[], Result]) -> None:
        self.act = act
        self.outcome: list[Result | Exception] = []
        self.is_running = self.is_given_up = False

    def run(self) -> None:
        """Call the function and note its result or error."""
        try:
            self.outcome.append(self.act())
        except Exception as error:
            self.outcome.append(error)
        except BaseException as error:
            self.outcome.append(StructuredOutputError(f"the compiler of grammars failed: {error!r}"))


class InTime:
    """Calls functions in threads of their own with large stacks, a few at a time. Any thread may use it.

        caller ── waits ──────────── until the deadline
        thread    waits for a place ── starts ──┐
        thread of a large stack                 └─ calls the function

    A thread cannot be stopped: a call that is too late is given up, and keeps its place until it is done.
    Places are taken and stacks are set where no signal is handled, so that none can be lost.
    """

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_RUNNING)

    def call(self, act: Callable[[], Result]) -> Result:
        """Return what a function returns, or raise what it raises.

        Raises:
            StructuredOutputError: it is too late, or no place became free in time.
        """
        job = _Job(act)
        thread = threading.Thread(target=self._run, args=(job,), name="octavo-grammar", daemon=True)
        try:
            thread.start()
            thread.join(DEADLINE_S)
        finally:
            job.is_given_up = True
        if not job.outcome:
            if job.is_running:
                raise StructuredOutputError(f"the grammar takes more than {DEADLINE_S:g} s to compile")
            raise StructuredOutputError("too many grammars are being compiled; try again later")
        (outcome,) = job.outcome
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _run(self, job: _Job) -> None:
        with self._places:
            if job.is_given_up:
                return
            job.is_running = True
            thread = threading.Thread(target=job.run, name="octavo-grammar-stack", daemon=True)
            try:
                with _STACK_SIZE:
                    before = threading.stack_size(_STACK_BYTES)
                    try:
                        thread.start()
                    finally:
                        threading.stack_size(before)
            except (RuntimeError, MemoryError) as error:
                job.outcome.append(
                    StructuredOutputError(f"no thread can be had to compile a grammar: {error}")
                )
                return
            thread.join()
