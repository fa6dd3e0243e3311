"""Renders chat messages into one prompt with the Jinja template that comes with a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from octavo.errors import ChatTemplateError, suggest
from octavo.tokenizer.chat.turns import rendered
from octavo.tokenizer.messages import check_json, checked_messages, checked_tools
from octavo.tokenizer.template_process import SHARED

VARIABLE_NAMES = frozenset(
    {
        "builtin_tools",
        "custom_tools",
        "date_string",
        "documents",
        "enable_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "tools_in_user_message",
    }
)
FUEL = 1_000_000
FUEL_PER_MESSAGE = 5_000


class ChatTemplate:
    """The chat template of a model.

    Templates are not trusted. They cannot reach Python objects, files or other templates, and a child process
    with limits on time and memory renders them (`template_process`); the first use starts it in less than a
    tenth of a second. A template is compiled when it is first used, so a broken one does not keep the model
    from loading and completing texts.

    Args:
        source: the Jinja template.
        tool_use_source: the template for conversations with tools, if the model has a separate one.
        bos_token: the piece that begins a text; a variable of the template.
        eos_token: the piece that ends a text; a variable of the template.
        clock: returns the time that `strftime_now` formats.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_use_source: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tool_use_source = tool_use_source
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_tokens = {name: piece for name, piece in tokens.items() if piece is not None}
        self._clock = clock

    @property
    def source_with_tools(self) -> str:
        """The template for conversations with tools."""
        return self._tool_use_source or self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render a conversation into the text of a prompt.

        The text already contains special tokens, so encode it with `add_special_tokens=False`.

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
        checked = checked_messages(messages)
        context: dict[str, object] = {
            **self._special_tokens,
            **_checked_variables(variables or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.source
        if tools is not None:
            context["tools"] = checked_tools(tools)
            source = self.source_with_tools
        fuel = FUEL + FUEL_PER_MESSAGE * (len(messages) + len(tools or ()))
        request: dict[str, object] = {"source": source, "fuel": fuel}
        if "strftime_now" in source:  # the text depends on the time
            request["now"] = self._clock().isoformat()
        return rendered(
            checked, source, lambda form: SHARED.render(_encoded(request, context | {"messages": form}))
        )


def _encoded(request: dict[str, object], context: dict[str, object]) -> bytes:
    try:
        return json.dumps(request | {"context": context}, ensure_ascii=False).encode()
    except ValueError as error:  # a lone surrogate, or a number of thousands of digits
        raise ChatTemplateError(
            f"expected messages, variables and template of valid Unicode and short numbers: {error}"
        ) from error


def _checked_variables(variables: Mapping[str, object]) -> dict[str, object]:
    for name, value in variables.items():
        if name not in VARIABLE_NAMES:
            raise ChatTemplateError(
                f"unknown template variable {name!r}{suggest(str(name), VARIABLE_NAMES)}; "
                f"expected one of {sorted(VARIABLE_NAMES)}"
            )
        check_json(value, f"variables[{name!r}]")
    return dict(variables)
