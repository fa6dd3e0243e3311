"""The tools of a chat: what it may call, how its answer is constrained, and how the answer is divided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.engine.prompt_reader import TokenIds
from octavo.errors import ChatTemplateError, StructuredOutputError
from octavo.sampling_params import SamplingParams, StructuredOutput
from octavo.server.api.prompt_tokens import Prompts, Reading
from octavo.server.api.structs import ChatRequest, FunctionTool, wish_of
from octavo.server.api.tools.tool_choice import chosen_names, function_tool
from octavo.server.api_errors import ApiError, refused
from octavo.server.parsing.answer import AnswerReader, Reader, ReasoningReader
from octavo.server.parsing.answer_grammars import (
    ConstrainedFunction,
    GrammarWriter,
    content_rule,
    harmony_grammar,
)
from octavo.server.parsing.call_formats import Function, described
from octavo.server.parsing.custom.text_reader import CustomReader
from octavo.server.parsing.custom.text_tool import TextParameters
from octavo.server.parsing.effort import reasoning_variables
from octavo.server.parsing.formats import ModelFormats
from octavo.server.parsing.harmony import open_channel, shown_messages
from octavo.server.parsing.harmony_reader import HarmonyReader
from octavo.tokenizer import ChatText, Tokenizer
from octavo.tokenizer.messages import check_json, checked_messages

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """One chat's tools.

    Attributes:
        tools: what the model is shown.
        functions: what it may call; none if calls are content.
        strict: names of those whose schemas hold for every call.
        customs: names of those that are custom tools.
        is_limited: tools that are shown may not be called.
        must_call: one of them must be called.
        parallel: it may call several.
        formats: what the model writes.
        has_begun_reasoning: the prompt opened the reasoning.
        channel: that of the harmony message the prompt left open, if any.
    """

    tools: Sequence[FunctionTool]
    functions: Sequence[Function]
    strict: frozenset[str]
    must_call: bool
    parallel: bool
    formats: ModelFormats
    customs: frozenset[str] = frozenset()
    is_limited: bool = False
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
        self, prompts: Prompts, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], list[Any] | None]:
        """Return the messages and the tools that the chat template gets.

        Raises:
            ChatTemplateError: a message is malformed.
        """
        messages, shown = prompts.canonical(messages, [_shown_tool(tool) for tool in self.tools])
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
        reader = self._reader()
        return CustomReader(reader, self.customs) if reader is not None and self.customs else reader

    def _reader(self) -> Reader | None:
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


def toolbox_of(fields: ChatRequest, formats: ModelFormats, structured: StructuredOutput | None) -> Toolbox:
    """Return the tools of a request, checked.

    Raises:
        ApiError: the fields contradict each other, or the model's calls cannot be read.
    """
    given = fields.tools or []
    customs = frozenset(tool.custom.name for tool in given if tool.custom)
    tools = [function_tool(tool) for tool in given]
    choice = fields.tool_choice or ("auto" if tools else "none")
    functions = _functions(tools)
    chosen, must_call = chosen_names(choice)
    if must_call and not tools:
        raise refused("tool_choice", "needs tools")
    if chosen is not None:
        missing = sorted(chosen - {name for name, _ in functions})
        if missing:
            raise refused("tool_choice", f"names {missing[0][:200]!r}, which is not in tools")
        if must_call and not chosen:
            raise refused("tool_choice", "needs a tool that may be called")
        functions = [function for function in functions if function[0] in chosen]
    if functions and choice != "none" and not formats.can_call:
        raise refused("tools", f"cannot be called: {formats.why_no_calls}")
    functions = [] if choice == "none" else functions
    strict = frozenset(function.name for function in tools if function.strict)
    if structured is not None and structured.grammar is not None and strict & {name for name, _ in functions}:
        raise refused("tools", "cannot be strict beside a grammar of your own, which holds for calls, too")
    return Toolbox(
        tools=[tool for tool in tools if not tool.defer_loading],
        functions=functions,
        strict=strict,
        must_call=must_call,
        parallel=fields.parallel_tool_calls is not False
        and not (must_call and chosen is not None and len(chosen) == 1),
        formats=formats,
        customs=customs,
        is_limited=chosen is not None,
    )


def read_prompt(
    prompts: Prompts, fields: ChatRequest, formats: ModelFormats, reading: Reading, params: SamplingParams
) -> tuple[TokenIds, Toolbox, SamplingParams]:
    """Render and tokenize a conversation with its tools; constrain the answer to them. This may take long.

    Raises:
        ChatTemplateError: no template, or it refuses the messages.
        ApiError: fields contradict each other, or as `toolbox_of`.
        PromptError, RequestTooLongError: as Prompts.read_text.
    """
    toolbox = toolbox_of(fields, formats, params.structured)
    chat = rendered(prompts, fields, toolbox)
    token_ids = prompts.read_chat(chat, reading)
    toolbox = toolbox.with_prompt(chat.text)
    assert prompts.tokenizer is not None
    return token_ids, toolbox, constrained_params(toolbox, params, prompts.tokenizer)


def rendered(prompts: Prompts, fields: ChatRequest, toolbox: Toolbox) -> ChatText:
    """Render the conversation.

    Raises:
        ChatTemplateError, ApiError: as `read_prompt`.
    """
    variables = {
        **wished_variables(prompts, fields, toolbox.formats),
        **(fields.chat_template_kwargs or {}),
    }
    messages, tools = toolbox.shown(prompts, fields.messages)
    return prompts.render(
        messages,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        variables=variables,
        tools=tools,
    )


def wished_variables(prompts: Prompts, fields: ChatRequest, formats: ModelFormats) -> dict[str, Any]:
    """Return the template's variables that say how much a request wants the model to reason."""
    template = prompts.tokenizer.chat_template if prompts.tokenizer else None
    effort, thinks = wish_of(fields)
    if template is None:
        return {}
    return reasoning_variables(template, effort, thinks, is_harmony=formats.harmony is not None)


def _functions(tools: Sequence[FunctionTool]) -> list[Function]:
    functions: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        name, parameters = tool.name, tool.parameters or {}
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
        if not isinstance(parameters, TextParameters):
            parameters = {"type": "object", **parameters} if parameters else _NO_PARAMETERS
        functions[name] = parameters
    return list(functions.items())


def _shown_tool(tool: FunctionTool) -> dict[str, Any]:
    """Return a tool as it was given, without fields that are not for the model."""
    function = msgspec.to_builtins(tool)
    unseen = ("strict", "defer_loading")
    shown = {name: value for name, value in function.items() if name not in unseen and value is not None}
    return {"type": "function", "function": shown}


def constrained_params(box: Toolbox, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return parameters with a grammar for what a chat's tools and its form of content ask for.

    Raises:
        ApiError: the schemas are too large, or the model's format cannot express one.
    """
    formats, writer = box.formats, GrammarWriter(tokenizer)
    markers = [*formats.reasoning] if formats.reasoning else []
    if box.functions and formats.calls:
        markers += formats.calls.markers
    if formats.harmony is not None or any(writer.special_id(marker) is not None for marker in markers):
        params = replace(params, skip_special_tokens=False)
    # What is said beside a call that must be made has no form.
    content = None if box.must_call else params.structured
    has_form = content is not None and content.grammar is None and content.json_schema != "false"
    functions = _constrained_functions(box, has_form=has_form)
    has_reasoning = formats.reasoning is not None or formats.harmony is not None
    if not functions and not (has_form and has_reasoning):
        return params
    if has_form and content is not None:
        _check_content(content)
    try:
        return replace(params, structured=_grammar(box, writer, functions, content))
    except StructuredOutputError as error:
        raise refused("tools", f"cannot be held to their schemas: {error}") from error


def _check_content(content: StructuredOutput) -> None:
    """Check the form alone, so that an error of it does not blame the tools."""
    try:
        content_rule(content)
    except StructuredOutputError as error:
        raise ApiError(400, f"{content.kind} cannot be used: {error}", param=content.kind) from error


def _constrained_functions(box: Toolbox, *, has_form: bool) -> list[ConstrainedFunction]:
    """Return the functions that a grammar must know; none: no grammar constrains calls."""
    if box.must_call or has_form:
        return list(box.functions)
    constrained = [(name, schema if name in box.strict else None) for name, schema in box.functions]
    return constrained if box.is_limited or any(schema is not None for _, schema in constrained) else []


def _grammar(
    box: Toolbox,
    writer: GrammarWriter,
    functions: list[ConstrainedFunction],
    content: StructuredOutput | None,
) -> StructuredOutput:
    formats = box.formats
    if formats.harmony is not None:
        return harmony_grammar(
            formats.harmony.harmony,
            functions,
            must_call=box.must_call,
            content=content,
            channel=box.channel,
        )
    calls = free = None
    if functions and formats.calls is not None:
        calls = writer.calls(formats.calls, functions, parallel=box.parallel)
        free = formats.calls if not box.must_call and content is None else None
    return writer.write(
        calls=calls,
        content=content,
        reasoning=formats.reasoning,
        has_begun=box.has_begun_reasoning,
        free=free,
    )
