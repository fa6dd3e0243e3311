"""Reads bodies of Ollama's /api/chat and /api/generate into prompts. Nothing here needs the engine."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from octavo.engine.prompt_reader import TokenIds
from octavo.sampling_params import SamplingParams
from octavo.server.api.body import decode
from octavo.server.api.ollama.ollama_structs import GivenMessage, OllamaChat, OllamaGenerate, Options
from octavo.server.api.prompt_tokens import Reading
from octavo.server.api.sampling import chat_params
from octavo.server.api.structs import ChatRequest, JsonObject, JsonSchema, ResponseFormat, Tool
from octavo.server.api.tools.toolbox import read_prompt, toolbox_of, wished_variables
from octavo.server.api_errors import ApiError, refused, refused_part
from octavo.server.reading.forms import Tools, packed
from octavo.server.reading.requests import Answered, Materials, check_model

# Options that no sampler here has, and the values that ask for nothing.
_NEUTRAL = {"tfs_z": 1.0, "typical_p": 1.0, "mirostat": 0, "penalize_newline": True}
_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


class OllamaInput(Struct):
    """A body that was read.

    Attributes:
        is_chat: the answer is a message.
        raw: the answer is all text: it is not divided.
        prompt: packed ids; empty: the model shall be loaded.
    """

    is_chat: bool
    stream: bool
    raw: bool
    params: SamplingParams
    prompt: bytes
    tools: Tools


def read_ollama_chat(materials: Materials, body: bytes) -> Answered:
    """Read a body of /api/chat into an OllamaInput, as msgpack. This may take long.

    Raises:
        ApiError, ChatTemplateError, PromptError, SamplingParamsError: it is malformed, or too long.
    """
    fields, left_out = decode(body, OllamaChat)
    return _read(materials, fields, _messages(fields.messages or ()), left_out)


def read_ollama_generate(materials: Materials, body: bytes) -> Answered:
    """Read a body of /api/generate, in the same way. Raises as `read_ollama_chat`."""
    fields, left_out = decode(body, OllamaGenerate)
    messages = [{"role": "system", "content": fields.system}] if fields.system else []
    if fields.raw and messages:
        raise refused("system", "contradicts raw: put it into the prompt")
    return _read(
        materials,
        fields,
        [*messages, {"role": "user", "content": fields.prompt}] if fields.prompt else [],
        left_out,
    )


def _read(
    materials: Materials,
    fields: OllamaChat | OllamaGenerate,
    messages: list[JsonObject],
    left_out: Sequence[str],
) -> Answered:
    check_model(fields.model, materials.model)
    chat = _chat_of(fields, messages)
    params = chat_params(chat, materials.defaults)
    box = toolbox_of(chat, materials.formats, params.structured)
    raw = isinstance(fields, OllamaGenerate) and bool(fields.raw)
    prompt = TokenIds.of([])
    if raw and messages:
        prompt = materials.prompts.read_text(messages[-1]["content"], Reading())
    elif messages:
        prompt, box, params = read_prompt(materials.prompts, chat, materials.formats, Reading(), params)
    has_switch = not raw and wished_variables(materials.prompts, chat, materials.formats)
    if fields.think is not None and not has_switch:
        left_out = (*left_out, "think")
    stream = fields.stream is not False
    found = OllamaInput(isinstance(fields, OllamaChat), stream, raw, params, packed(prompt), Tools.of(box))
    return msgspec.msgpack.encode(found), tuple(left_out)


def _chat_of(fields: OllamaChat | OllamaGenerate, messages: list[JsonObject]) -> ChatRequest:
    """Return a body as a chat.

    Raises:
        ApiError: an option cannot be honoured, or a tool is malformed.
    """
    options, think = fields.options or Options(), fields.think
    tools = fields.tools if isinstance(fields, OllamaChat) else None
    chat = ChatRequest(
        messages=messages or [{}],
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())],
        response_format=_format(fields.format),
        logprobs=fields.logprobs,
        top_logprobs=fields.top_logprobs,
        enable_thinking=think if isinstance(think, bool) else None,
        reasoning_effort=think if isinstance(think, str) else None,
    )
    return structs.replace(chat, **_sampling(options))


def _sampling(options: Options) -> dict[str, Any]:
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in (None, neutral):
            raise refused(name, f"is not supported; leave it out, or give {neutral!r}".lower())
    if options.repeat_penalty not in (None, 1) and options.repeat_last_n not in (None, -1):
        raise refused("repeat_last_n", "is not supported: repeat_penalty sees the whole text; give -1")
    num, seed = options.num_predict, options.seed
    return {
        **{name: getattr(options, name) for name in _SAME_NAME},
        "stop": options.stop or None,
        "repetition_penalty": options.repeat_penalty,
        "max_tokens": None if num in (-1, -2) else num,
        "seed": None if seed is None or seed < 0 else seed,
    }


def _format(given: str | JsonObject | None) -> ResponseFormat | None:
    if not given:
        return None
    if isinstance(given, str):
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given))


def _tool(tool: JsonObject, where: str) -> Tool:
    try:
        return msgspec.convert({"type": "function", **tool}, Tool)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{where}: {error}", param=where) from error


def _messages(given: Sequence[GivenMessage]) -> list[JsonObject]:
    """Return messages as a chat has them: calls get ids, by which results find them."""
    messages: list[JsonObject] = []
    waiting: list[tuple[str, str]] = []
    for index, message in enumerate(given):
        if message.images:
            raise refused_part(f"messages[{index}].images", "image", "expected none, got images")
        found: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            found["reasoning_content"] = message.thinking
        calls = []
        if message.tool_calls:
            # Results follow their calls, so older ones get none; to search them all would take long.
            waiting = []
        for number, call in enumerate(message.tool_calls or ()):
            call_id = call.id or f"call_{index}_{number}"
            waiting.append((call_id, call.function.name))
            function = {"name": call.function.name, "arguments": call.function.arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        if calls:
            found["tool_calls"] = calls
        if message.role == "tool":
            found["tool_call_id"] = message.tool_call_id or _answered(waiting, message.tool_name)
        messages.append(found)
    return messages


def _answered(waiting: list[tuple[str, str]], name: str | None) -> str:
    """Return the id of the call that a result is for: the first one of its name, or the first."""
    at = next((at for at, (_, called) in enumerate(waiting) if name in (None, called)), None)
    return "call" if at is None else waiting.pop(at)[0]
