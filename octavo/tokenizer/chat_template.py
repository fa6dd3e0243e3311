"""Renders chat messages into one prompt with the Jinja template that comes with a model."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from octavo.errors import ChatTemplateError, suggest
from octavo.tokenizer.control_tokens import ControlTokens
from octavo.tokenizer.messages import check_json, checked_messages, checked_tools, encoded, encoded_text
from octavo.tokenizer.template_process import SHARED
from octavo.tokenizer.turns import Roles, rendered

MessageControlTokens = Literal["text", "refuse", "allow"]

_VARIABLES = (
    "builtin_tools custom_tools date_string documents enable_thinking reasoning_effort thinking "
    "thinking_budget tools_in_user_message"
)
VARIABLE_NAMES = frozenset(_VARIABLES.split())
_CODE_MARKS = re.compile(r"\{[%{]|[%}]\}")
_TEXTS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


@dataclass(frozen=True, slots=True)
class ChatText:
    """The text of a prompt, which a chat template wrote.

    Attributes:
        marked: the text, with `mark` within each control token that stood in a message.
        mark: a character that is nowhere else in the text; empty: no message has a control token.
    """

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return "".join(self.pieces)

    @property
    def pieces(self) -> list[str]:
        """The text, cut so that the control tokens that are left in the pieces are the template's own.

        A filter may have written the mark as an escape of JSON.
        """
        if not self.mark:
            return [self.marked]
        return self.marked.replace(f"\\u{ord(self.mark):04x}", self.mark).split(self.mark)

    def before(self, place: str) -> "ChatText | None":
        """Return what comes before the last occurrence of a text; None: there is none."""
        before, found, _ = self.marked.rpartition(place)
        return ChatText(before, self.mark) if found else None


class ChatTemplate:
    """The chat template of a model.

    Templates are not trusted. They cannot reach Python objects, files or other templates, and a child process
    with limits on time and memory renders them (`template_process`); the first use starts it in a tenth of a
    second. A template is compiled when it is first used, so a broken one does not keep the model from loading
    and completing texts.

    Args:
        source: the Jinja template.
        tool_use_source: the template for conversations with tools, if the model has a separate one.
        bos_token: the piece that begins a text; a variable of the template.
        eos_token: the piece that ends a text; a variable of the template.
        special_tokens: pieces by name, such as `pad_token`: further variables of the template.
        control_tokens: the vocabulary's tokens that no message may write.
        clock: returns the time that `strftime_now` formats.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_use_source: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: ControlTokens | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tool_use_source = tool_use_source
        tokens = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        self._special_tokens = {name: piece for name, piece in tokens.items() if piece is not None}
        self._control_tokens = control_tokens
        self._clock = clock

    @property
    def source_with_tools(self) -> str:
        """The template for conversations with tools."""
        return self._tool_use_source or self.source

    @cached_property
    def variables(self) -> frozenset[str]:
        """Those of VARIABLE_NAMES that the template reads."""
        code = _TEXTS.sub("", " ".join(_CODE_MARKS.split(self.source + self.source_with_tools)[1::2]))
        return frozenset(
            name for name in VARIABLE_NAMES if re.search(rf"(?<![.\w]){name}\b(?!\s*=[^=])", code)
        )

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return those words that stand in the template as texts of their own."""
        texts = {text[1:-1] for text in _TEXTS.findall(self.source)}
        return tuple(word for word in words if word in texts)

    @cached_property
    def _roles(self) -> Mapping[str, Roles]:
        return {source: Roles(source) for source in {self.source, self.source_with_tools}}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render a conversation into the text that transformers makes of it, whatever is left out.

        Args:
            messages: mappings with `role` and `content` (text or a list of text parts), and optionally
                `name`, `tool_calls`, `tool_call_id`, `reasoning_content` and `thinking`.
            add_generation_prompt: end with the start of an assistant's answer.
            tools: JSON descriptions of functions that the model may call.
            variables: further template variables; their names are in `VARIABLE_NAMES`.

        Raises:
            ChatTemplateError: the messages are malformed, a variable is not allowed, or the template
                is invalid, refuses the messages or exceeds a bound.
        """
        return self._rendered(_inputs(messages, tools, variables), add_generation_prompt)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
        message_control_tokens: MessageControlTokens = "text",
    ) -> ChatText:
        """Render a conversation into a prompt for the model.

        Unlike `render` it sees to it that each turn is in the prompt (a developer's as the system's, where
        need be), and that no message writes a control token. Encode it with `Tokenizer.encode_chat`.

        Args:
            messages, add_generation_prompt, tools, variables: as in `render`.
            message_control_tokens: what becomes of control tokens in messages, tools and variables; see
                EngineConfig.

        Raises:
            ChatTemplateError: as in `render`; or a role is unknown, the template leaves a turn out, or
                messages hold a control token that is refused.
        """
        inputs = _inputs(messages, tools, variables)
        roles = self._roles[self._source_for(inputs)]
        roles.check(inputs["messages"])
        inputs, mark = self._guarded(inputs, message_control_tokens)

        def render(messages: list[dict[str, Any]]) -> str:
            return self._rendered({**inputs, "messages": messages}, add_generation_prompt)

        others = {name: value for name, value in inputs.items() if name not in ("messages", "tools")}
        settings = others | {"tools": inputs["tools"] is not None, "prompt": add_generation_prompt}
        return ChatText(roles.rendered(inputs["messages"], render, settings), mark)

    def guarded(self, text: str, message_control_tokens: MessageControlTokens = "text") -> ChatText:
        """Return a user's text, whose control tokens stay text, for a prompt that no template writes.

        Raises:
            ChatTemplateError: it holds a control token that is refused.
        """
        inputs = {"messages": [{"role": "user", "content": text}]}
        inputs, mark = self._guarded(inputs, message_control_tokens)
        return ChatText(inputs["messages"][0]["content"], mark)

    def _guarded(
        self, inputs: dict[str, Any], message_control_tokens: MessageControlTokens
    ) -> tuple[dict[str, Any], str]:
        """Mark or refuse the control tokens in what a template gets; return it with the mark."""
        if self._control_tokens is None or message_control_tokens == "allow":
            return inputs, ""
        if message_control_tokens == "refuse":
            self._control_tokens.refuse(inputs)
        return self._control_tokens.marked(inputs)

    def _source_for(self, inputs: Mapping[str, Any]) -> str:
        return self.source if inputs["tools"] is None else self.source_with_tools

    def _rendered(self, inputs: Mapping[str, Any], add_generation_prompt: bool) -> str:
        source = self._source_for(inputs)
        context = {**self._special_tokens, **inputs, "add_generation_prompt": add_generation_prompt}
        request: dict[str, object] = {}
        if "strftime_now" in source:  # the text depends on the time
            request["now"] = self._clock().isoformat()

        def render(form: list[dict[str, Any]]) -> str:
            form_request = request | {"context": context | {"messages": form}}
            return SHARED.render(encoded_text(source) + b"\0" + encoded(form_request))

        return rendered(inputs["messages"], source, render)


def _inputs(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, object] | None,
) -> dict[str, Any]:
    """Return the template's variables that come from a request. Transformers passes None for missing ones."""
    return {
        "documents": None,
        **_checked_variables(variables or {}),
        "messages": [_with_reasoning(message) for message in checked_messages(messages)],
        "tools": None if tools is None else checked_tools(tools),
    }


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give reasoning both names that templates read, as transformers does."""
    reasoning = message.get("reasoning_content", message.get("thinking"))
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _checked_variables(variables: Mapping[str, object]) -> dict[str, object]:
    for name, value in variables.items():
        if name not in VARIABLE_NAMES:
            raise ChatTemplateError(
                f"unknown template variable {name!r}{suggest(str(name), VARIABLE_NAMES)}; "
                f"expected one of {sorted(VARIABLE_NAMES)}"
            )
        check_json(value, f"variables[{name!r}]")
    return dict(variables)
