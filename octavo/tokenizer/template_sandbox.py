"""Renders untrusted Jinja templates; runs as a script in a child process (`template_process`).

To start fast it imports only minijinja and the standard library. Its standard input is a socket, which
carries requests and replies: a header with a number and a length, then that many bytes of JSON. A reply
carries the number of its request. `run` is what any child of `octavo.child_process` does; others import it.
"""

import json
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import minijinja

HEADER = struct.Struct("!QQ")
MAX_SOURCE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
MAX_TAG_TOKENS = 1000
MAX_INDENT = 64
MAX_ERROR_CHARS = 10_000

TAG_OPEN = re.compile(r"\{[{%#]")
TAG_TOKEN = re.compile(r"""\s+|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\w+|.""", re.DOTALL)
GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


class RenderError(Exception):
    """The template is malformed, refuses the messages, or exceeds a bound."""


class Renderer:
    """One compiled template.

    It bounds the length of the source and of the result, the number of instructions (fuel), the tokens in one
    tag (each may take a stack frame), and the size of what filters produce. The limits of the child process
    bound the rest: operators, methods and the depth of values.

    Raises:
        RenderError: the source is too long.
        minijinja.TemplateError: the source is not valid Jinja.
    """

    def __init__(self, source: str) -> None:
        check_source(source)
        self._environment = minijinja.Environment(
            pycompat=True, trim_blocks=True, lstrip_blocks=True, debug=False
        )
        for name, function in FILTERS.items():
            self._environment.add_filter(name, function)
        # an argument sets the size of their result; chat templates do not use them
        for name in ("format", "batch", "slice"):
            self._environment.remove_filter(name)
        self._environment.remove_global("debug")
        self._environment.add_global("raise_exception", _raise_exception)
        self._environment.add_template("chat", without_generation_tags(source))

    def render(self, context: Mapping[str, object], *, fuel: int) -> str:
        """Render with the given variables.

        Args:
            context: variables by name: JSON values and functions.
            fuel: number of template instructions allowed.

        Raises:
            RenderError: the template refuses the messages, or exceeds a bound.
            minijinja.TemplateError: the template fails, or is out of fuel.
            ArithmeticError, LookupError, RecursionError, TypeError, ValueError: a filter fails.
        """
        self._environment.fuel = fuel
        text = self._environment.render_template("chat", **context)
        return _bounded(text, len(text))


def check_source(source: str) -> None:
    """Refuse templates that could overflow the parser's stack.

    Raises:
        RenderError: the source, or one tag of it, is too long.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise RenderError(f"expected at most {MAX_SOURCE_CHARS} characters of template, got {len(source)}")
    position = 0
    while opened := TAG_OPEN.search(source, position):
        if opened[0] == "{#":
            end = source.find("#}", opened.end())
            position = len(source) if end < 0 else end + 2
        else:
            position = _end_of_tag(source, opened)


def _end_of_tag(source: str, opened: re.Match[str]) -> int:
    close = "}}" if opened[0] == "{{" else "%}"
    position, depth, num_tokens = opened.end(), 0, 0
    while token := TAG_TOKEN.match(source, position):
        if depth == 0 and source.startswith(close, position):
            return position + 2
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        num_tokens += not token[0].isspace()
        if num_tokens > MAX_TAG_TOKENS:
            raise RenderError(
                f"expected at most {MAX_TAG_TOKENS} tokens in one tag of the template, got more"
            )
        position = token.end()
    return position


def without_generation_tags(source: str) -> str:
    """Turn `{% generation %}` blocks, which mark answers for training, into `{% if true %}` blocks."""
    return GENERATION_TAG.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", source)


def _bounded(text: str, length: int) -> str:
    if length > MAX_OUTPUT_CHARS:
        raise RenderError(f"expected at most {MAX_OUTPUT_CHARS} characters, got {length}")
    return text


def _raise_exception(message: object) -> None:
    raise RenderError(str(message))


def _replace(value: object, old: object, new: object, count: int | None = None) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    num_found = text.count(old)
    if count is not None and count >= 0:
        num_found = min(num_found, count)
    _bounded("", len(text) + num_found * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _join(value: Iterable[object] | None, separator: object = "", attribute: str | None = None) -> str:
    items = list(value or ())
    if attribute is not None:
        items = [item.get(attribute) if isinstance(item, Mapping) else None for item in items]
    parts, separator = [str(item) for item in items], _text(separator)
    _bounded("", sum(map(len, parts)) + len(parts) * len(separator))
    return separator.join(parts)


def _indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = width if isinstance(width, str) else " " * _checked_width(width)
    text = _text(value)
    lines = text.splitlines() + ([""] if text.endswith("\n") else [])
    _bounded("", len(text) + len(lines) * len(prefix))
    indented = [prefix + line if line or blank else line for line in lines[1:]]
    return "\n".join([(prefix if first else "") + "".join(lines[:1]), *indented])


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: list[str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None:
        _checked_width(indent)
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _checked_width(width: int) -> int:
    if not 0 <= width <= MAX_INDENT:
        raise RenderError(f"expected an indent from 0 to {MAX_INDENT}, got {width}")
    return width


def _text(value: object) -> str:
    """Return a value as Jinja prints it; minijinja passes an undefined one as None."""
    return "" if value is None else str(value)


FILTERS: Mapping[str, Callable[..., str]] = {
    "replace": _replace,
    "join": _join,
    "indent": _indent,
    "tojson": _to_json,
}


def answer(request: Mapping[str, Any], renderer_of: Callable[[str], Renderer]) -> dict[str, str]:
    """Render one request.

    Args:
        request: `{"source", "context", "fuel"}`, and `"now"` if the template may ask for the time.
        renderer_of: returns the compiled template of a source.

    Returns:
        `{"text"}`, or `{"error"}` if the template is malformed, fails, refuses the messages or exceeds a
        bound.
    """
    context = request["context"]
    if "now" in request:
        context["strftime_now"] = datetime.fromisoformat(request["now"]).strftime
    try:
        return {"text": renderer_of(request["source"]).render(context, fuel=request["fuel"])}
    except minijinja.TemplateError as error:
        cause = error.message
    except RenderError as error:
        cause = str(error)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
    return {"error": cause[:MAX_ERROR_CHARS]}


def serve(
    requests: BinaryIO, replies: BinaryIO, cpu_seconds: float, answer_frame: Callable[[bytes], bytes]
) -> None:
    """Answer requests until the parent closes the socket or ends.

    A timer's signal ends this process if a request takes more processor time than allowed.

    Args:
        requests: where to read.
        replies: where to write. The first frame, number 0 and empty, says that this process is ready.
        cpu_seconds: processor time allowed for one request.
        answer_frame: from a request's bytes to its reply's.
    """
    number, body = 0, b""
    while True:
        replies.write(HEADER.pack(number, len(body)) + body)
        replies.flush()
        header = requests.read(HEADER.size)
        if len(header) < HEADER.size:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        number, length = HEADER.unpack(header)
        body = answer_frame(requests.read(length))


def run(answer_frame: Callable[[bytes], bytes]) -> None:
    """Limit this process and serve; the arguments are processor seconds and bytes of memory."""
    cpu_seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    # the parent may ignore or block the timer's signal, and this process inherits that
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # ValueError: a lower limit is in force already, or the system (macOS) does not have this one
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with open(0, "rb", closefd=False) as requests, open(0, "wb", closefd=False) as replies:
        serve(requests, replies, cpu_seconds, answer_frame)


def main() -> None:
    """Render templates."""
    renderer_of = lru_cache(maxsize=4)(Renderer)

    def answer_frame(request: bytes) -> bytes:
        reply = answer(json.loads(request), renderer_of)
        return json.dumps(reply, ensure_ascii=False).encode("utf-8", "replace")

    run(answer_frame)


if __name__ == "__main__":
    main()
