"""Renders chat templates in a child process with limits on time and memory.

A template comes with a model. A hostile one can run forever, take all memory or overflow the stack in ways
that no template engine prevents. So one warm child process, which runs `template_sandbox.py` as a script,
renders for all threads of this process:

    first use                            start the child; it says when it is ready
    each use                             send request 7; receive reply 7, a text or an error
    over a limit, interrupted, or dead   kill the child and wait for it; the next use starts another
    this process ends, in whatever way   the child reaches the end of its input and ends
"""

import atexit
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from octavo.errors import ChatTemplateError
from octavo.tokenizer.text_cache import TextCache

CPU_SECONDS = 1.0
MEMORY_BYTES = 768 * 2**20
# the child limits its processor time; these cover a machine too busy to give it any
WALL_SECONDS = 5.0
START_SECONDS = 30.0
CACHE_BYTES = 4 * 2**20

_SCRIPT = Path(__file__).with_name("template_sandbox.py")
_HEADER = struct.Struct("!QQ")
# a dead child must not end a process that does not ignore SIGPIPE
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


class _Reply(msgspec.Struct):
    text: str | None = None
    error: str | None = None


class _ChildDiedError(Exception):
    """The child ended before it replied; the message names the limits it had."""


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
            request: JSON as `template_sandbox.answer` takes it.

        Raises:
            ChatTemplateError: the template fails, refuses the messages or exceeds a bound; or no child
                process can be started.
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
    """A child process and the connection to it.

    Raises:
        ChatTemplateError: it cannot be started.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._number = 0
        self._connection, theirs = socket.socketpair()
        command = [sys.executable or "python3", "-P", str(_SCRIPT), str(CPU_SECONDS), str(MEMORY_BYTES)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the parent alone
                )
            self._connection.settimeout(START_SECONDS)
            self._receive()
            self._connection.settimeout(WALL_SECONDS)
        except BaseException as error:
            self.stop()
            if not isinstance(error, OSError):
                raise
            raise ChatTemplateError(
                f"expected a process for chat templates to start, got: {error}; "
                f"this command may say why: {' '.join(command)}"
            ) from error

    @property
    def pid(self) -> int | None:
        """Process id, or None if there is no process yet."""
        return None if self._process is None else self._process.pid

    def ask(self, request: bytes) -> _Reply:
        """Send a request and wait for its reply. After an error, stop the child.

        Raises:
            ChatTemplateError: there is no reply in time.
            _ChildDiedError: the child died for another reason.
        """
        self._number += 1
        try:
            self._connection.sendall(_HEADER.pack(self._number, len(request)) + request, _SEND_FLAGS)
            return msgspec.json.decode(self._receive(), type=_Reply)
        except TimeoutError as error:
            raise _over_limit(f"{WALL_SECONDS:g} s") from error
        except OSError as error:
            raise _death(self.stop()) from error

    def _receive(self) -> bytes:
        number, length = _HEADER.unpack(self._read(_HEADER.size))
        if number != self._number:
            raise ConnectionError(f"expected reply {self._number}, got {number}")
        return self._read(length)

    def _read(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            piece = self._connection.recv(min(length - len(received), 2**20))
            if not piece:
                raise ConnectionError("the child process ended")
            received += piece
        return bytes(received)

    def stop(self) -> int | None:
        """Kill the child if it still runs; return its exit code, which is negative for a signal."""
        if self._process is not None:
            self._process.kill()
        self._connection.close()
        return None if self._process is None else self._process.wait()

    def disown(self) -> None:
        """Let go of the child, in a process forked from its parent."""
        self._connection.close()
        if self._process is not None:
            self._process.returncode = 0  # or Popen would wait for a child of another process


def _death(code: int | None) -> Exception:
    if code == -signal.SIGPROF:
        return _over_limit(f"{CPU_SECONDS:g} s of processor time")
    return _ChildDiedError(f"{MEMORY_BYTES // 2**20} MiB of memory and a shallow stack (exit code {code})")


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
