"""How tool calls are written: what readers, grammars and descriptions of tools need to know."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.server.parsing.call_reader import CallReader
from octavo.server.parsing.calls import GemmaReader, HermesReader, LlamaReader, MistralReader, XmlReader
from octavo.server.parsing.gemma.gemma_call import QUOTE, gemma_text
from octavo.server.parsing.xml_values import GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, XmlTags

Function = tuple[str, Mapping[str, Any]]
"""A function's name and the schema of its arguments."""
Markers = tuple[str, str]

_TOOL_CALL: Markers = ("<tool_call>", "</tool_call>")
_INTRODUCTION = """\
You can call functions to answer. These are described here, one a line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments like this, and nothing after it:
{example}
The result comes in <tool_response></tool_response>."""
_NAME, _ARGUMENTS = "NAME", {"ARGUMENT": "VALUE"}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls whose arguments are JSON.

    Attributes:
        new_reader: returns a reader for one answer, given the names of functions that may be called.
        trigger: the text at which a call begins.
        begin: text before a call, or before all of them.
        end: text after a call.
        arguments_key: key of the arguments; None: they follow the name, after [ARGS].
        separator: text between calls.
        is_list: all calls form one JSON list.
        markers: texts that may be special tokens.
        is_bare: an answer that begins like a call is one, even without a marker.
    """

    new_reader: Callable[[Set[str]], CallReader]
    trigger: str
    begin: str = ""
    end: str = ""
    arguments_key: str | None = "arguments"
    separator: str = "\n"
    is_list: bool = False
    markers: tuple[str, ...] = ()
    is_bare: bool = False

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """Return a reader for one answer, given the functions that may be called."""
        return self.new_reader(frozenset(name for name, _ in functions))

    def written(self, calls: Iterable[tuple[str, object]]) -> str:
        """Return calls, given as names and arguments, as the model would write them."""
        body = self.separator.join(self._written(name, arguments) for name, arguments in calls)
        return f"{self.begin}[{body}]" if self.is_list else body

    def _written(self, name: str, arguments: object) -> str:
        text = json.dumps(arguments, ensure_ascii=False)
        if self.arguments_key is None:
            return f"{self.begin}{name}[ARGS]{text}"
        body = f'{{"name": {json.dumps(name)}, "{self.arguments_key}": {text}}}'
        return body if self.is_list else f"{self.begin}{body}{self.end}"


@dataclass(frozen=True, slots=True)
class XmlFormat(CallFormat):
    """Calls whose arguments are texts between XML tags.

    Attributes:
        tags: these.
    """

    tags: XmlTags = QWEN_TAGS

    @classmethod
    def of(cls, tags: XmlTags) -> "XmlFormat":
        """Return a format with these tags."""
        call, end = (f"{tags.call}\n", f"{tags.end_function}\n") if tags.function else (tags.call, "")
        return cls(
            lambda names: XmlReader({name: {} for name in names}, tags),
            tags.function or tags.call,
            call + tags.function,
            end + tags.end_call,
            markers=(tags.call, tags.end_call),
            tags=tags,
        )

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """Return a reader for one answer, which makes JSON of arguments by their schemas."""
        return XmlReader(dict(functions), self.tags)

    def _written(self, name: str, arguments: object) -> str:
        assert isinstance(arguments, Mapping)
        tags, around = self.tags, self.tags.around
        values = "".join(
            f"{tags.parameter}{key}{tags.end_keys[0]}{around}{_plain(value)}{around}{tags.end_parameter}\n"
            for key, value in arguments.items()
        )
        return f"{self.begin}{name}{tags.end_name}\n{values}{self.end}"


@dataclass(frozen=True, slots=True)
class GemmaFormat(CallFormat):
    """Gemma 4's calls, whose arguments are like JSON."""

    def _written(self, name: str, arguments: object) -> str:
        return f"{self.begin}{name}{gemma_text(arguments)}{self.end}"


def hermes(markers: Markers = _TOOL_CALL) -> CallFormat:
    """Return Hermes's and Qwen's format, with these markers."""
    begin, end = markers
    return CallFormat(
        partial(HermesReader, markers=(begin,), end=end), begin, f"{begin}\n", f"\n{end}", markers=markers
    )


QWEN3_CODER, GLM45, MINIMAX = map(XmlFormat.of, (QWEN_TAGS, GLM_TAGS, MINIMAX_TAGS))
GEMMA4 = GemmaFormat(
    GemmaReader,
    "<|tool_call>",
    "<|tool_call>call:",
    "<tool_call|>",
    separator="",
    markers=("<|tool_call>", "<tool_call|>", QUOTE),
)
LLAMA = CallFormat(
    LlamaReader,
    "<|python_tag|>",
    arguments_key="parameters",
    separator="; ",
    markers=("<|python_tag|>",),
    is_bare=True,
)
_MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL_LIST = CallFormat(
    MistralReader, "[TOOL_CALLS]", "[TOOL_CALLS]", separator=", ", is_list=True, markers=_MISTRAL_MARKERS
)
MISTRAL = CallFormat(
    MistralReader,
    "[TOOL_CALLS]",
    "[TOOL_CALLS]",
    arguments_key=None,
    separator="",
    markers=_MISTRAL_MARKERS,
)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallFormat
) -> list[dict[str, Any]]:
    """Return messages that say in plain text what tools there are, what was called and what came back.

    This is for models whose chat template does not show tools.

    Args:
        messages: checked ones (tokenizer/messages.py): contents are texts, arguments are objects.
        tools: what may be called.
        form: how the model is to call.
    """
    plain: list[dict[str, Any]] = []
    last_role = ""
    for message in messages:
        if message["role"] == "tool":
            _add_result(plain, message, joins=last_role == "tool")
        elif "tool_calls" in message:
            plain.append(_with_written_calls(message, form))
        else:
            plain.append(dict(message))
        last_role = message["role"]
    if not tools:
        return plain
    text = _INTRODUCTION.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        example=form.written([(_NAME, _ARGUMENTS)]),
    )
    if plain[0]["role"] in ("system", "developer"):
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _add_result(plain: list[dict[str, Any]], message: Mapping[str, Any], *, joins: bool) -> None:
    """Add a result as a user's message. Results of one turn are joined: templates want turns to alternate."""
    text = f"<tool_response>\n{message['content']}\n</tool_response>"
    if joins:
        plain[-1]["content"] += f"\n{text}"
    else:
        plain.append({"role": "user", "content": text})


def _with_written_calls(message: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = form.written([(function.get("name", ""), function["arguments"]) for function in functions])
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], calls)))}
