"""The tools of a chat: what it may call, how its answer is held to that, and how the answer is divided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.engine.prompt_reader import TokenIds
from octavo.errors import ChatTemplateError
from octavo.sampling_params import SamplingParams, StructuredOutput
from octavo.server.api.prompts import Prompts, Reading
from octavo.server.api.tools.held import held_params
from octavo.server.api.tools.types import NamedTool, Tool
from octavo.server.api.types import ChatRequest
from octavo.server.errors import refused
from octavo.server.parsing.answer import AnswerReader, Reader
from octavo.server.parsing.call_formats import Function
from octavo.server.parsing.describe import described
from octavo.server.parsing.formats import ModelFormats
from octavo.server.parsing.harmony.messages import open_channel, shown_messages
from octavo.server.parsing.harmony.reader import HarmonyReader
from octavo.server.parsing.reasoning import ReasoningReader
from octavo.tokenizer import ChatText
from octavo.tokenizer.messages import check_json, checked_messages

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """One chat's tools.

    Attributes:
        tools: what the model is shown.
        functions: what it may call; none if calls are content.
        strict: names of those whose schemas hold for every call.
        must_call: one of them must be called.
        parallel: it may call several.
        formats: what the model writes.
        has_begun_reasoning: the prompt opened the reasoning.
        channel: of the message in harmony that the prompt left open.
    """

    tools: Sequence[Tool]
    functions: Sequence[Function]
    strict: frozenset[str]
    must_call: bool
    parallel: bool
    formats: ModelFormats
    has_begun_reasoning: bool = False
    channel: str | None = None

    def with_prompt(self, text: str) -> "Toolbox":
        """Note what the prompt opens."""
        if self.formats.harmony is not None:
            return replace(self, channel=open_channel(text))
        reasoning = self.formats.reasoning
        has_begun = reasoning is not None and text.rstrip().endswith(reasoning[0])
        return replace(self, has_begun_reasoning=has_begun)

    def shown(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], list[Any] | None]:
        """Return the messages and the tools that the chat template gets.

        Raises:
            ChatTemplateError: a message is malformed.
        """
        shown = [_shown_tool(tool) for tool in self.tools]
        if self.formats.harmony is not None:
            for tool in shown:  # the template of gpt-oss fails without a description
                tool["function"]["description"] = tool["function"].get("description", "")
            return [*shown_messages(checked_messages(messages))], shown or None
        if self.formats.shows_tools or self.formats.calls is None:
            return list(messages), shown or None
        if not shown and not any(m.get("role") == "tool" or m.get("tool_calls") for m in messages):
            return list(messages), None
        return [*described(checked_messages(messages), shown, self.formats.calls)], None

    def reader(self) -> Reader | None:
        """Return a reader for one answer; None: all of it is content."""
        formats, reasoning, calls = self.formats, None, None
        if formats.harmony is not None:
            return HarmonyReader(
                formats.harmony.harmony,
                names=frozenset(name for name, _ in self.functions),
                shows_reasoning=formats.harmony.reasoning,
                channel=self.channel,
            )
        if formats.reasoning is not None:
            reasoning = ReasoningReader(*formats.reasoning, has_begun=self.has_begun_reasoning)
        if self.functions and formats.calls is not None:
            calls = formats.calls.reader(self.functions)
        return None if reasoning is None and calls is None else AnswerReader(reasoning, calls)


def toolbox_of(asked: ChatRequest, formats: ModelFormats, structured: StructuredOutput | None) -> Toolbox:
    """Return the tools of a request, checked.

    Raises:
        ApiError: the fields contradict each other, or the model's calls cannot be read.
    """
    tools = asked.tools or []
    choice = asked.tool_choice or ("auto" if tools else "none")
    functions = _functions(tools)
    must_call = isinstance(choice, NamedTool) or choice == "required"
    if must_call and not tools:
        raise refused("tool_choice", "needs tools")
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function[0] == choice.function.name]
        if not functions:
            raise refused("tool_choice", f"names {choice.function.name[:200]!r}, which is not in tools")
    if functions and choice != "none" and not formats.can_call:
        raise refused("tools", f"cannot be called: {formats.why_no_calls}")
    if must_call and structured is not None:
        raise refused("tool_choice", "and a form of the content contradict each other; give one of them")
    functions = [] if choice == "none" else functions
    strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
    if structured is not None and structured.grammar is not None and strict & {name for name, _ in functions}:
        raise refused("tools", "cannot be strict beside a grammar of your own, which holds for calls, too")
    return Toolbox(
        tools=tools,
        functions=functions,
        strict=strict,
        must_call=must_call,
        parallel=asked.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
        formats=formats,
    )


def read_prompt(
    prompts: Prompts, asked: ChatRequest, formats: ModelFormats, reading: Reading, params: SamplingParams
) -> tuple[TokenIds, Toolbox, SamplingParams]:
    """Render and tokenize a conversation with its tools; hold the answer to what is asked. May take long.

    Raises:
        ChatTemplateError: no template, or it refuses the messages.
        ApiError: fields contradict each other, or as `toolbox_of`.
        PromptError, RequestTooLongError: as Prompts.read_text.
    """
    toolbox = toolbox_of(asked, formats, params.structured)
    chat = rendered(prompts, asked, toolbox)
    token_ids = prompts.read_chat(chat, reading)
    toolbox = toolbox.with_prompt(chat.text)
    assert prompts.tokenizer is not None
    return token_ids, toolbox, held_params(toolbox, params, prompts.tokenizer)


def rendered(prompts: Prompts, asked: ChatRequest, toolbox: Toolbox) -> ChatText:
    """Render the conversation.

    Raises:
        ChatTemplateError, ApiError: as `read_prompt`.
    """
    variables = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
    messages, tools = toolbox.shown(asked.messages)
    return prompts.render(
        messages,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        variables=variables,
        tools=tools,
    )


def _functions(tools: Sequence[Tool]) -> list[Function]:
    functions: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        name, parameters = tool.function.name, tool.function.parameters or {}
        if name in functions:
            raise refused("tools", f"must have names of their own, got {name!r} twice")
        if parameters.get("type", "object") != "object":
            raise refused(
                "tools", f"must take an object as parameters, got {parameters['type']!r} for {name!r}"
            )
        try:
            check_json(parameters, name)
        except ChatTemplateError as error:
            raise refused("tools", f"must be readable: {error}") from error
        functions[name] = {"type": "object", **parameters} if parameters else _NO_PARAMETERS
    return list(functions.items())


def _shown_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as it was given, without fields that are not for the model."""
    function = msgspec.to_builtins(tool.function)
    shown = {name: value for name, value in function.items() if name != "strict" and value is not None}
    return {"type": "function", "function": shown}
