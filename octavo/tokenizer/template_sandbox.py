"""Renders untrusted Jinja templates; runs as a script in a child process (`template_process`).

Jinja2's sandbox renders them, set up as transformers does, so that a prompt is the one that the model was
trained with. To start fast it imports nothing else beyond the standard library. Its standard input is a
socket, which carries requests and replies: a header with a number and a length, then that many bytes. A reply
carries the number of its request. `run` is what any child of `octavo.child_process` does; others
import it.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

HEADER = struct.Struct("!QQ")
MAX_SOURCE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
MAX_ERROR_CHARS = 10_000
_METHODS = frozenset(dir(dict))
# Attributes that the sandbox would allow after it has looked at them. `format` is not among them.
_SAFE: Mapping[type, frozenset[str]] = {
    str: frozenset({"endswith", "lstrip", "replace", "rstrip", "split", "startswith", "strip"}),
    dict: frozenset({"get", "items", "keys", "values"}),
    LoopContext: frozenset(
        {"first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex"}
    ),
}
# What Python reports to audit hooks while Jinja2 compiles a template, runs it or says where it failed.
HARMLESS_EVENTS = frozenset(
    {"builtins.id", "code.__new__", "compile", "exec", "object.__getattr__", "sys._getframe"}
)
# Modules that Jinja2 and Python import when a template needs them, which is too late after `lock_up`.
LATE_IMPORTS = (
    "encodings.ascii encodings.latin_1 encodings.unicode_escape html jinja2.constants jinja2.debug textwrap "
    "unicodedata"
)


class RenderError(Exception):
    """The template is malformed, refuses the messages, or exceeds a bound."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, quicker with what templates do most."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or an item of this name."""
        kind = type(obj)
        if kind is dict and attribute not in _METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE.get(kind, ()) or (kind is _Namespace and attribute in obj._Namespace__attrs):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _Generation(Extension):
    """`{% generation %}` blocks, which mark answers for training: here only their content counts.

    As in transformers they are calls, so variables set within one are unknown after it.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` for templates: it can be called, and nothing else."""

    def __call__(self, *items: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*items, **entries)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Return a dictionary with one value for all keys."""
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """`namespace` for templates, without names that Python gives a meaning."""

    def __init__(*items: Any, **entries: Any) -> None:
        self, *rest = items
        attributes = dict(*rest, **entries)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"expected a namespace's attribute that does not begin with '_', got {name!r}")


def _raise_exception(message: object) -> None:
    raise RenderError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; unlike Jinja2's own filter, without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def compiled(encoded: bytes) -> jinja2.Template:
    """Compile a template.

    Raises:
        RenderError: the source is too long.
        jinja2.TemplateError: it is not valid Jinja.
    """
    source = encoded.decode()
    if len(source) > MAX_SOURCE_CHARS:
        raise RenderError(f"expected at most {MAX_SOURCE_CHARS} characters of template, got {len(source)}")
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def answer(request: bytes, template_of: Callable[[bytes], jinja2.Template]) -> dict[str, str]:
    """Render one request.

    Args:
        request: a template's source, a zero byte, and JSON: `{"context"}`, and `"now"` if the template may
            ask for the time.
        template_of: returns the compiled template of a source.

    Returns:
        `{"text"}`, or `{"error"}` if the template is malformed, fails, refuses the messages or exceeds a
        bound.
    """
    source, _, body = request.rpartition(b"\0")
    fields = json.loads(body)
    context = fields["context"]
    if "now" in fields:
        now = datetime.fromisoformat(fields["now"])
        context["strftime_now"] = lambda format: now.strftime(format)
    try:
        text = template_of(source).render(context)
        if len(text) > MAX_OUTPUT_CHARS:
            raise RenderError(f"expected at most {MAX_OUTPUT_CHARS} characters, got {len(text)}")
    except MemoryError:  # earlier templates may have left too little: the parent asks a fresh process
        raise
    except Exception as error:  # a template can fail in any way that Python can
        return {"error": _cause(error)[:MAX_ERROR_CHARS]}
    return {"text": text}


def _cause(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"syntax error: {error.message} (in chat:{error.lineno})"
    if isinstance(error, RenderError | TemplateError):
        return str(error)
    return f"{type(error).__name__}: {error}"


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


def run(answer_frame: Callable[[bytes], bytes], lock_up: Callable[[], None] = lambda: None) -> None:
    """Limit this process and serve; the arguments are processor seconds and bytes of memory.

    Args:
        answer_frame: from a request's bytes to its reply's.
        lock_up: takes further rights from this process, once its files are open.
    """
    cpu_seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    # the parent may ignore or block the timer's signal, and this process inherits that
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # ValueError: a lower limit is in force already, or the system (macOS) does not have this one
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with open(0, "rb", closefd=False) as requests, open(0, "wb", closefd=False) as replies:
        lock_up()
        serve(requests, replies, cpu_seconds, answer_frame)


def lock_up() -> None:
    """Take from this process what no template needs, so that an escape from the sandbox finds nothing.

    It can open no file and no socket, write no file and start no process. Python's own operations that reach
    out of the interpreter are refused as well, imports among them. None of this can be undone.
    """
    for module in LATE_IMPORTS.split():
        import_module(module)
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        with suppress(ValueError):
            resource.setrlimit(limit, (0, 0))

    def refuse(event: str, _: tuple[object, ...]) -> None:
        if event not in HARMLESS_EVENTS:
            raise RenderError(f"expected a template that only makes text, got one that asks for {event}")

    sys.addaudithook(refuse)


def main() -> None:
    """Render templates."""
    template_of = lru_cache(maxsize=8)(compiled)

    def answer_frame(request: bytes) -> bytes:
        return json.dumps(answer(request, template_of), ensure_ascii=False).encode("utf-8", "replace")

    run(answer_frame, lock_up)


if __name__ == "__main__":
    main()
