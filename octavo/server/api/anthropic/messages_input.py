"""Converts a request of /v1/messages to a chat."""

from collections.abc import Sequence

import msgspec

from octavo.server.api.anthropic.messages_blocks import BlockReader
from octavo.server.api.anthropic.messages_structs import (
    NO_THREAD,
    CountRequest,
    MessageFields,
    MessagesRequest,
    TokenCount,
)
from octavo.server.api.anthropic.messages_tools import choice_of, descriptions_of, tools_of
from octavo.server.api.body import decode
from octavo.server.api.left_out import SEARCH_TOOLS
from octavo.server.api.prompt_tokens import Reading
from octavo.server.api.sampling import Defaults, chat_params
from octavo.server.api.structs import ChatRequest, JsonObject, JsonSchema, ResponseFormat
from octavo.server.api.tools.toolbox import rendered, toolbox_of
from octavo.server.api_errors import ApiError, refused
from octavo.server.reading.requests import Answered, ChatInput, Materials, check_model


def parse_messages(body: bytes, defaults: Defaults) -> ChatInput:
    """Decode a body of /v1/messages.

    Raises:
        ApiError, SamplingParamsError: it is malformed, or a value is out of range.
    """
    fields, left_out = decode(body, MessagesRequest)
    chat = chat_of(fields, left_out)
    return ChatInput(fields, chat, chat_params(chat, defaults), _with_thread(fields, left_out))


def counted(materials: Materials, body: bytes) -> Answered:
    """Answer a body of /v1/messages/count_tokens.

    Raises:
        ApiError, ChatTemplateError, PromptError: it is malformed.
    """
    fields, left_out = decode(body, CountRequest)
    check_model(fields.model, materials.model)
    chat, prompts = chat_of(fields, left_out), materials.prompts
    shown = rendered(prompts, chat, toolbox_of(chat, materials.formats, None))
    count = len(prompts.encode_chat(shown, Reading()))
    return msgspec.json.encode(TokenCount(count)), _with_thread(fields, left_out)


def _with_thread(fields: MessageFields, left_out: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is left out, with the wish that the conversation be kept.

    Raises:
        ApiError: the request goes on with one that was kept. Anthropic's client then sends all of it again.
    """
    if fields.thread is None:
        return left_out
    if fields.thread.type == "continue":
        text = "thread: this server keeps no messages, so there is none to go on with; send all of them"
        raise ApiError(404, text, param="thread", code=NO_THREAD)
    return (*left_out, "thread")


def chat_of(fields: CountRequest | MessagesRequest, left_out: Sequence[str] = ()) -> ChatRequest:
    """Return a request as a chat, by what was left out of it. A last message of the assistant is continued.

    Raises:
        ApiError: a block is of a kind that is not supported there, or fields contradict each other.
    """
    # Where the search for tools was left out, the model needs to see all of them.
    tools = tools_of(fields.tools or (), defers=f"tools[] {SEARCH_TOOLS}" not in left_out)
    messages = _messages(fields, BlockReader(descriptions_of(tools)))
    choice, thinking = fields.tool_choice, fields.thinking
    return ChatRequest(
        messages=messages,
        continue_final_message=messages[-1]["role"] == "assistant",
        tools=tools,
        tool_choice=None if choice is None else choice_of(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        enable_thinking=None if thinking is None else thinking.type != "disabled",
        reasoning_effort=_effort(fields),
        response_format=_form(fields),
        max_tokens=fields.max_tokens,
        stop=fields.stop_sequences,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
    )


def _messages(fields: MessageFields, blocks: BlockReader) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if fields.system is not None and fields.system != []:
        messages.append({"role": "system", "content": blocks.text(fields.system, "system", "system")})
    if fields.messages[0].role == "system":
        raise refused(
            "messages[0].role", "must not be system: what comes before all turns is the field system"
        )
    last_user = max((i for i, message in enumerate(fields.messages) if message.role == "user"), default=-1)
    for index, message in enumerate(fields.messages):
        if message.clear_at != "next_user_message" or index >= last_user:
            messages += blocks.turns(message, f"messages[{index}]")
    return messages


def _effort(fields: MessageFields) -> str | None:
    """Return the effort that a message asked for last, or else the request."""
    wishes = [fields.output_config, *(message.output_config for message in fields.messages)]
    efforts = [wish.effort for wish in wishes if wish is not None and wish.effort is not None]
    return efforts[-1] if efforts else None


def _form(fields: MessageFields) -> ResponseFormat | None:
    form = (fields.output_config and fields.output_config.format) or fields.output_format
    return form and ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema))
