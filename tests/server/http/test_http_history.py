"""Every answer, whole or cut at any token, streamed or not, in every API, comes back as history and renders.

A grammar dictates what the tiny model writes; max_tokens cuts it. Answers are put together as OpenAI's and
Anthropic's clients do, sent back with a result for each of their calls, and rendered by templates that look
into contents in all the ways that published ones do.
"""

import importlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import msgspec
import pytest
from conftest import TINY, served
from http_helpers import LiveServer
from tiny_chat import write_model

from octavo import EngineConfig
from octavo.sampling_params import StructuredOutput
from octavo.server.api.anthropic import messages_input
from octavo.server.api.anthropic.messages_structs import MessagesRequest
from octavo.server.api.responses import response_input
from octavo.server.api.responses.response_structs import ResponsesRequest
from octavo.tokenizer.chat_template import ChatTemplate

FIND: dict[str, Any] = {
    "name": "find",
    "description": "Where a city is",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
TOOL = {"type": "function", "function": FIND}
BLOCK_TOOL = {"name": "find", "input_schema": FIND["parameters"]}
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Ro\\"me", "days": 3}}\n</tool_call>'
BARE = '<tool_call>\n{"name": "find", "arguments": null}\n</tool_call>'
DEEP = '<tool_call>{"name": "?", "arguments": ' + '{"a":' * 20 + "1" + "}" * 20 + "}</tool_call>"
MALFORMED = '<tool_call>{"name": "find", "arguments": {"a": }}</tool_call>'
ANSWERS = {
    "reasoning, text and a call": f"Hm.</think>\n\nI look.\n{CALL}",
    "a call and text after it": f"</think>{CALL}\nDone.",
    "two calls": f"Hm.</think>{CALL}\n{BARE}",
    "a malformed call and another one": "</think>" + MALFORMED + CALL,
    "an unknown function and a deep object": "</think>" + DEEP,
    "nothing": "Hm.</think>",
}  # fmt: skip

TURNS = "{% for m in messages %}[{{ m.role }}]READ{% endfor %}[assistant]<think>"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
)
# How templates read an assistant's turn, after those of Qwen3, QwQ, Devstral, Ministral 3, Bielik and others.
READINGS = {
    "in": "{% if m.role == 'assistant' and '</think>' in m.content %}x{% endif %}{{ m.content }}" + CALLS,
    "split": "{{ m.content.split('</think>')[-1].lstrip('\n') }}" + CALLS,
    "trim": "{{ m.content | trim }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | items | list }}{% endfor %}",
    "length": "{% if m.content is not none and m.content == 'x' %}{% endif %}"
    "{% if m.content is string %}{{ m.content }}"
    "{% elif m.content | length > 0 %}{{ m.content[0].text }}{% endif %}" + CALLS,
    "plus": "{{ '<s>' + m.content + '</s>' }}" + CALLS,
    "null": "{% if m.content is none %}{% if not m.tool_calls %}{{ raise_exception('nothing') }}{% endif %}"
    "{% else %}{{ m.content + '.' }}{% endif %}" + CALLS,
    "calls for null": "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "not empty": "{% if (m.content is none or m.content | length == 0) and not m.tool_calls %}"
    "{{ raise_exception('neither content nor calls') }}{% endif %}{{ m.content }}" + CALLS,
    "not both": "{% if m.content is not none and m.content | length > 0 and m.tool_calls %}"
    "{{ raise_exception('both content and calls') }}{% endif %}{{ m.content }}" + CALLS,
    "whole": "{{ m.content }}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% endfor %}{% endif %}",
}
SHOWS_TOOLS = '{% if tools %}{{ tools | tojson }}<tool_call>{{ \'{"name": 1, "arguments": 2}\' }}{% endif %}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_model(tmp_path_factory.mktemp("history"), max_model_len=4096)
    (folder / "chat_template.jinja").write_text(SHOWS_TOOLS + TURNS.replace("READ", READINGS["in"]))
    yield from served(EngineConfig.from_dict({"model": str(folder), **TINY, "num_blocks": 2048}), "tiny")


@pytest.fixture(scope="module")
def openais(server: LiveServer, openai: ModuleType) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropics(server: LiveServer) -> Iterator[Any]:
    anthropic = importlib.import_module("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def dictate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a grammar hold in the APIs that take none, too."""
    chosen: dict[str, StructuredOutput] = {}
    chat_params = messages_input.chat_params
    monkeypatch.setattr(
        messages_input,
        "chat_params",
        lambda *given: replace(chat_params(*given), structured=chosen.get("now")),
    )
    monkeypatch.setattr(response_input, "_structured", lambda _: chosen.get("now"))

    def say(text: str | None) -> None:
        chosen.clear()
        if text is not None:
            chosen["now"] = StructuredOutput(grammar=grammar(text))

    return say


def grammar(text: str) -> str:
    return f"start: {json.dumps(text, ensure_ascii=False)}"


def renders(messages: list[dict[str, Any]], answer: object) -> None:
    """Check that every template takes a conversation, and that no text in it is a null's."""
    for name, reading in READINGS.items():
        text = ChatTemplate(TURNS.replace("READ", reading)).render(messages)
        assert "None" not in text, (name, answer, text)
        assert "Hi" in text
        # Calls are shown; one template has a place for them only where there is no content.
        if name != "calls for null" or not messages[1].get("content"):
            for call in messages[1].get("tool_calls") or []:
                assert call["function"]["name"] in text or messages[1]["content"], (name, answer, text)


def chat_messages(client: Any, text: str, most: int) -> Iterator[dict[str, Any]]:
    """The answer as a client has it: whole, put together from a stream, and put together by hand."""
    body = {"structured_outputs": {"grammar": grammar(text)}, "tools": [TOOL]}
    asked: dict[str, Any] = {"model": "tiny", "messages": [HI], "max_tokens": most, "extra_body": body}
    yield client.chat.completions.create(**asked).choices[0].message.model_dump()
    state = importlib.import_module("openai.lib.streaming.chat").ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
    message = state.current_completion_snapshot.choices[0].message
    yield message.model_dump()
    yield message.model_dump(exclude_none=True)


def results(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]


def chats(server: LiveServer, client: Any, text: str, most: int) -> None:
    for answer in chat_messages(client, text, most):
        turns = [HI, answer, *results(answer.get("tool_calls") or []), HI]
        found = server.post("/v1/chat/completions", {"messages": turns, "tools": [TOOL], "max_tokens": 1})
        assert found.status_code == 200, (answer, found.text)
        renders(turns, answer)


def responses(client: Any, most: int) -> list[Any]:
    """Answers of /v1/responses, whole and streamed, to what `dictate` says."""
    tool = {"type": "function", **FIND}
    asked: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": [tool], "max_output_tokens": most}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        # The client knows no final response of one that is cut.
        return [whole, list(stream)[-1].response]


def responses_come_back(server: LiveServer, answers: list[Any]) -> None:
    for items in ([item.model_dump() for item in answer.output] for answer in answers):
        calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        told = [{"type": "function_call_output", "call_id": call, "output": "x"} for call in calls]
        turns = [HI, *items, *told, HI]
        body = {"input": turns, "tools": [{"type": "function", **FIND}], "max_output_tokens": 1}
        found = server.post("/v1/responses", body)
        assert found.status_code == 200, (items, found.text)
        renders(response_input.chat_of(msgspec.convert(body, ResponsesRequest)).messages, items)


def blocks(client: Any, most: int) -> list[Any]:
    """Answers of /v1/messages, whole and streamed, to what `dictate` says."""
    asked: dict[str, Any] = {"model": "tiny", "messages": [HI], "tools": [BLOCK_TOOL], "max_tokens": most}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return [whole, stream.get_final_message()]


def blocks_come_back(server: LiveServer, answers: list[Any]) -> None:
    for content in ([block.model_dump() for block in answer.content] for answer in answers):
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        told = [{"type": "tool_result", "tool_use_id": call, "content": "x"} for call in calls]
        user = {"role": "user", "content": [*told, {"type": "text", "text": "Hi"}]}
        for given in (content, [block for block in content if block.get("text") != ""]):
            body = {
                "messages": [HI, {"role": "assistant", "content": given}, user],
                "tools": [BLOCK_TOOL],
                "max_tokens": 1,
            }
            found = server.post("/v1/messages", body)
            assert found.status_code == 200, (given, found.text)
            renders(messages_input.chat_of(msgspec.convert(body, MessagesRequest)).messages, given)


@pytest.mark.parametrize("step", [29, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_comes_back(
    server: LiveServer, openais: Any, anthropics: Any, dictate: Any, name: str, step: int
) -> None:
    text = ANSWERS[name]
    # Every token is a byte or more.
    cuts = [*range(1 + len(name) % step, len(text.encode()), step), 300]
    # All cuts at once: the engine's steps serve them together, which takes half of the time.
    with ThreadPoolExecutor(len(cuts)) as pool:
        list(pool.map(partial(chats, server, openais, text), cuts))
        dictate(text)
        of_responses = list(pool.map(partial(responses, openais), cuts))
        of_messages = list(pool.map(partial(blocks, anthropics), cuts))
        dictate(None)
        list(pool.map(partial(responses_come_back, server), of_responses))
        list(pool.map(partial(blocks_come_back, server), of_messages))
    server.assert_drained()
