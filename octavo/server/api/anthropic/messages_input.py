"""Converts a request of /v1/messages to a chat."""

import msgspec

from octavo.server.api.anthropic.messages_blocks import text_of, turns_of
from octavo.server.api.anthropic.messages_structs import CountRequest, MessagesRequest, TokenCount
from octavo.server.api.anthropic.messages_tools import choice_of, tool_of
from octavo.server.api.body import decode
from octavo.server.api.prompt_tokens import Reading
from octavo.server.api.sampling import Defaults, chat_params
from octavo.server.api.structs import ChatRequest, JsonObject, JsonSchema, ResponseFormat
from octavo.server.api.toolbox import rendered, toolbox_of
from octavo.server.api_errors import ApiError
from octavo.server.reading.requests import Answered, ChatInput, Materials, check_model


def parse_messages(body: bytes, defaults: Defaults) -> ChatInput:
    """Decode a body of /v1/messages.

    Raises:
        ApiError, SamplingParamsError: it is malformed, or a value is out of range.
    """
    fields, left_out = decode(body, MessagesRequest)
    chat = chat_of(fields)
    return ChatInput(fields, chat, chat_params(chat, defaults), left_out)


def counted(materials: Materials, body: bytes) -> Answered:
    """Answer a body of /v1/messages/count_tokens.

    Raises:
        ApiError, ChatTemplateError, PromptError: it is malformed.
    """
    fields, left_out = decode(body, CountRequest)
    check_model(fields.model, materials.model)
    chat, prompts = chat_of(fields), materials.prompts
    shown = rendered(prompts, chat, toolbox_of(chat, materials.formats, None))
    count = len(prompts.encode_chat(shown, Reading()))
    return msgspec.json.encode(TokenCount(count)), left_out


def chat_of(fields: CountRequest) -> ChatRequest:
    """Return a request as a chat. A last message of the assistant is continued.

    Raises:
        ApiError: a block is of a kind that is not supported there, or fields contradict each other.
    """
    if fields.thread is not None and fields.thread.type == "continue":
        text = "thread: this server keeps no messages, so this one cannot go on; send the whole conversation"
        raise ApiError(404, text, param="thread", code="thread_not_found")
    messages = _messages(fields)
    choice, thinking = fields.tool_choice, fields.thinking
    return ChatRequest(
        messages=messages,
        continue_final_message=messages[-1]["role"] == "assistant",
        tools=[tool_of(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or ())],
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


def _messages(fields: CountRequest) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if fields.system not in (None, []):
        messages.append({"role": "system", "content": text_of(fields.system, "system", "system")})
    last_user = max((i for i, message in enumerate(fields.messages) if message.role == "user"), default=-1)
    for index, message in enumerate(fields.messages):
        if message.clear_at != "next_user_message" or index > last_user:
            messages += turns_of(message, f"messages[{index}]")
    if not messages:
        raise ApiError(400, "messages: expected one that the model reads, got none", param="messages")
    return messages


def _effort(fields: CountRequest) -> str | None:
    """Return the effort that a message asked for last, or else the request."""
    wishes = [fields.output_config, *(message.output_config for message in fields.messages)]
    efforts = [wish.effort for wish in wishes if wish is not None and wish.effort is not None]
    return efforts[-1] if efforts else None


def _form(fields: CountRequest) -> ResponseFormat | None:
    form = None if fields.output_config is None else fields.output_config.format
    form = form or fields.output_format
    if form is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema))
