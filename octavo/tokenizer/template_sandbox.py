"""Renders one Jinja template with bounds, in this process or, run as a script, in a child of it.

As a script it must start fast and alone, so it imports minijinja and the standard library only. It
reads one JSON request from its standard input and writes one JSON reply to its standard output.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import minijinja

MAX_SOURCE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
MAX_TAG_TOKENS = 1000
MAX_INDENT = 64
CHILD_MEMORY_BYTES = 768 * 1024 * 1024
CHILD_CPU_SECONDS = 1

TAG_OPEN = re.compile(r"\{[{%#]")
TAG_TOKEN = re.compile(r"""\s+|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\w+|.""", re.DOTALL)
GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


class RenderError(Exception):
    """The template is malformed, refuses the messages, or exceeds a bound."""


class Renderer:
    """One compiled template.

    Bounds: the length of the source and of the result, the number of instructions (fuel), the number
    of tokens in one tag (each may cost a stack frame), and the size of what filters produce. Operators
    are not bounded: a hostile template can still take much memory with them, which is why a template
    that a request brings is rendered in a child process with limits of its own.

    Raises:
        RenderError: the source is too long or not valid Jinja.
    """

    def __init__(self, source: str) -> None:
        check_source(source)
        self._environment = minijinja.Environment(
            pycompat=True, trim_blocks=True, lstrip_blocks=True, debug=False
        )
        for name, function in FILTERS.items():
            self._environment.add_filter(name, function)
        # the size of their result is an argument, and chat templates do not use them
        for name in ("format", "batch", "slice"):
            self._environment.remove_filter(name)
        self._environment.remove_global("debug")
        self._environment.add_global("raise_exception", _raise_exception)
        try:
            self._environment.add_template("chat", without_generation_tags(source))
        except minijinja.TemplateError as error:
            raise RenderError(error.message) from error

    def render(self, context: Mapping[str, object], *, fuel: int, now: datetime) -> str:
        """Render with the given variables.

        Args:
            context: variables by name, made of JSON values.
            fuel: number of template instructions allowed.
            now: what `strftime_now` formats.

        Raises:
            RenderError: the template fails, refuses the messages, or exceeds a bound.
        """
        self._environment.fuel = fuel
        try:
            text = self._environment.render_template("chat", **context, strftime_now=now.strftime)
        except minijinja.TemplateError as error:
            raise RenderError(error.message) from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise RenderError(f"{type(error).__name__}: {error}") from error
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
    """Turn `{% generation %}` blocks, which mark answers for training, into blocks that are always on."""
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
    """A value as Jinja prints it; minijinja passes an undefined one as None."""
    return "" if value is None else str(value)


FILTERS: Mapping[str, Callable[..., str]] = {
    "replace": _replace,
    "join": _join,
    "indent": _indent,
    "tojson": _to_json,
}


def _limit_this_process() -> None:
    import resource  # a POSIX module; only the child process needs it

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_SECONDS, CHILD_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY_BYTES, CHILD_MEMORY_BYTES))


def main() -> None:
    """Answer one request: `{"source", "context", "fuel", "now"}` with `{"text"}` or `{"error"}`."""
    _limit_this_process()
    request = json.load(sys.stdin)
    try:
        now = datetime.fromisoformat(request["now"])
        text = Renderer(request["source"]).render(request["context"], fuel=request["fuel"], now=now)
        reply = {"text": text}
    except RenderError as error:
        reply = {"error": str(error)}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
