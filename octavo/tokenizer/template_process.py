"""Renders chat templates in a child process with limits on time and memory.

A template comes with a model. A hostile one can run forever, take all memory or overflow the stack in ways
that no template engine prevents, and a flaw of the engine could let it out of its sandbox. So one warm child
process, which runs `template_sandbox.py` as a script, renders for all threads of this process:

    first use                            start the child; it says when it is ready
    each use                             send request 7; receive reply 7, a text or an error
    over a limit, interrupted, or dead   kill the child and wait for it; the next use starts another
    this process ends, in whatever way   the child reaches the end of its input and ends
"""

import atexit
import os
import signal
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec

from octavo.child_process import ChildProcess
from octavo.errors import ChatTemplateError, TemplateProcessError

CPU_SECONDS = 1.0
MEMORY_BYTES = 768 * 2**20
# the child limits its processor time; these cover a machine too busy to give it any
WALL_SECONDS = 5.0
# a template that used this much processor time is slow itself; otherwise the child was stopped, or the
# machine is busy
OWN_SECONDS = 0.2
START_SECONDS = 30.0
CACHE_BYTES = 4 * 2**20

_SCRIPT = Path(__file__).with_name("template_sandbox.py")


class TextCache:
    """Keeps texts by the bytes they were made from. Threads may share it.

    Args:
        max_bytes: limit for keys and texts together. An entry above a quarter of it is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> str | None:
        """Return the text of a key, or None."""
        with self._lock:
            if key not in self._texts:
                return None
            self._texts.move_to_end(key)
            return self._texts[key]

    def put(self, key: bytes, text: str) -> None:
        """Keep the text of a key."""
        with self._lock:
            if key in self._texts or _num_bytes(key, text) > self._max_bytes // 4:
                return
            self._texts[key] = text
            self._num_bytes += _num_bytes(key, text)
            while self._texts and self._num_bytes > self._max_bytes:
                self._num_bytes -= _num_bytes(*self._texts.popitem(last=False))


def _num_bytes(key: bytes, text: str) -> int:
    return sys.getsizeof(key) + sys.getsizeof(text)


class _Reply(msgspec.Struct):
    text: str | None = None
    error: str | None = None


class _ChildDiedError(Exception):
    """The child ended before it replied; the message names the limits it had.

    Attributes:
        was_killed: by somebody else; its own limits end it by other signals.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"{MEMORY_BYTES // 2**20} MiB of memory and a shallow stack (exit code {code})")
        self.was_killed = code in (-signal.SIGKILL, -signal.SIGTERM)


class TemplateProcess:
    """A child process that renders one template at a time, for any number of threads.

    It caches texts by request. A process forked from this one starts a child of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._texts = TextCache(CACHE_BYTES)

    @property
    def pid(self) -> int | None:
        """Process id of the child, or None before the first use and after a failure."""
        child = self._child
        return None if child is None else child.pid

    def render(self, request: bytes) -> str:
        """Render one template.

        If a warm child dies, a fresh one gets the request too: the old one may have died while idle, or from
        memory that earlier templates left behind.

        Args:
            request: bytes as `template_sandbox.answer` takes them.

        Raises:
            ChatTemplateError: the template fails, refuses the messages or exceeds a bound.
            TemplateProcessError: no child process can be started, or somebody stopped or killed it.
        """
        text = self._texts.get(request)
        if text is None:
            with self._lock:
                text = self._rendered(request)
            self._texts.put(request, text)
        return text

    def _rendered(self, request: bytes) -> str:
        if self._child is not None:
            with suppress(_ChildDiedError):
                return self._ask(request)
        try:
            return self._ask(request)
        except _ChildDiedError as error:
            if error.was_killed:
                raise TemplateProcessError("the process for chat templates was killed; try again") from error
            raise _over_limit(str(error)) from error

    def _ask(self, request: bytes) -> str:
        try:
            if self._child is None:
                self._child = _Child()
            reply = self._child.ask(request)
        except BaseException:  # KeyboardInterrupt too: nobody will read this child's next reply
            self.close()
            raise
        if reply.text is None:
            raise _failed(str(reply.error))
        return reply.text

    def close(self) -> None:
        """End the child process; the next use starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def forget(self) -> None:
        """Start over in a forked process: the child and the locks belong to the parent."""
        child = self._child
        self.__init__()
        if child is not None:
            child.disown()


class _Child:
    """The child process, with errors that tell which limit was exceeded.

    Raises:
        TemplateProcessError: it cannot be started.
    """

    def __init__(self) -> None:
        command = [sys.executable or "python3", "-P", str(_SCRIPT), str(CPU_SECONDS), str(MEMORY_BYTES)]
        try:
            self._process = ChildProcess(
                command, start_s=START_SECONDS, wall_s=WALL_SECONDS, environment=_environment()
            )
        except OSError as error:
            raise TemplateProcessError(
                f"expected a process for chat templates to start, got: {error}; "
                f"this command may say why: {' '.join(command)}"
            ) from error
        self.pid = self._process.pid
        self.stop, self.disown = self._process.stop, self._process.disown

    def ask(self, request: bytes) -> _Reply:
        """Send a request and wait for its reply. After an error, stop the child.

        Raises:
            ChatTemplateError: the template needs too much time.
            TemplateProcessError: there is no reply in time, though the child did not use its own up.
            _ChildDiedError: the child died for another reason.
        """
        begun_s = _cpu_s(self.pid)
        try:
            return msgspec.json.decode(self._process.ask(request), type=_Reply)
        except TimeoutError as error:
            if _cpu_s(self.pid) - begun_s > OWN_SECONDS:
                raise _over_limit(f"{WALL_SECONDS:g} s") from error
            raise TemplateProcessError(
                "the process for chat templates was stopped or got no time: expected its reply after at "
                f"most {WALL_SECONDS:g} s; try again"
            ) from error
        except OSError as error:
            raise _death(self.stop()) from error


def _environment() -> dict[str, str]:
    """Return what Python needs to start; other variables, such as keys, are not for templates."""
    needed = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
    return {
        name: value
        for name, value in os.environ.items()
        if name in needed or name.startswith(("PYTHON", "LC_", "LD_", "DYLD_"))
    }


def _cpu_s(pid: int | None) -> float:
    """Return the processor time of a process, or 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _death(code: int | None) -> Exception:
    if code == -signal.SIGPROF:
        return _over_limit(f"{CPU_SECONDS:g} s of processor time")
    return _ChildDiedError(code)


def _over_limit(limit: str) -> ChatTemplateError:
    return _failed(
        f"expected it to need at most {limit}, got more; "
        "shorten the conversation, or write the prompt without this model's template"
    )


def _failed(cause: str) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template failed: {cause}")


# One child serves all models of this process.
SHARED = TemplateProcess()
atexit.register(SHARED.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SHARED.forget)
