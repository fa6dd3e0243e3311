"""/v1/messages: Anthropic's own client against a live server, events byte for byte, what is refused."""

import asyncio
import importlib
import json
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
from http_helpers import LiveServer, chat, slow

URL, KEY = "/v1/messages", "sk-0123456789abcdef"
# The client knows no temperature any more.
GREEDY = {"temperature": 0}
HI: list[Any] = [{"role": "user", "content": "Hi"}]
CLOCK: dict[str, Any] = {
    "name": "now",
    "description": "The time",
    "input_schema": {"type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"]},
}
CALL: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 300,
    "messages": HI,
    "tools": [{**CLOCK, "input_schema": {**CLOCK["input_schema"], "additionalProperties": False}}],
    "tool_choice": {"type": "tool", "name": "now"},
    "extra_body": GREEDY,
}


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    """The client, which takes seconds to import: only a process that runs these tests does."""
    return importlib.import_module("anthropic")


@pytest.fixture
def client(roomy: LiveServer, anthropic: ModuleType) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=roomy.url, api_key="unused", max_retries=0) as client:
        yield client


def ask(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    """A request of one message, greedy and short unless told otherwise."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 4, **fields}


def told(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {msgspec.json.encode({'type': kind, **fields}).decode()}\n\n"


def usage(num_input: int, num_cached: int, num_output: int) -> dict[str, int]:
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    return dict(zip(names, (num_input, 0, num_cached, num_output), strict=True))


def test_a_stream_byte_for_byte(roomy: LiveServer) -> None:
    whole = roomy.post(URL, ask(system="Be kind.")).json()
    with roomy.http.stream("POST", URL, json=ask(system="Be kind.", stream=True)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        written = answer.read().decode()
    deltas = [json.loads(text) for text in re.findall(r'"text_delta","text":("(?:[^"\\]|\\.)*")', written)]
    assert "".join(deltas) == whole["content"][0]["text"]
    # The second time, all full blocks of 4 tokens come from the cache; the last token is always computed.
    num_prompt = sum(number for name, number in whole["usage"].items() if "input" in name)
    cached = (num_prompt - 1) // 4 * 4
    begun = {
        "id": json.loads(written.splitlines()[1].removeprefix("data: "))["message"]["id"],
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(num_prompt, 0, 0),
    }
    ended = {"stop_reason": "max_tokens", "stop_sequence": None}
    assert written == "".join(
        [
            told("message_start", message=begun),
            told("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            *(
                told("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
                for text in deltas
            ),
            told("content_block_stop", index=0),
            told("message_delta", delta=ended, usage=usage(num_prompt - cached, cached, 4)),
            told("message_stop"),
        ]
    )


def test_the_answer_is_the_chats(roomy: LiveServer) -> None:
    expected = roomy.post("/v1/chat/completions", chat("Hi", max_tokens=8)).json()["choices"][0]
    answer = roomy.post(URL, ask(max_tokens=8)).json()
    assert answer["content"] == [{"type": "text", "text": expected["message"]["content"]}]
    begun = expected["message"]["content"][0]
    stopped = roomy.post(URL, ask(stop_sequences=[begun])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", begun)
    # A last message of the assistant is continued, not answered.
    turns = [*HI, {"role": "assistant", "content": [{"type": "text", "text": begun}]}]
    count = roomy.post(f"{URL}/count_tokens", {"messages": turns}).json()["input_tokens"]
    assert count == roomy.post(f"{URL}/count_tokens", {"messages": HI}).json()["input_tokens"] + 1


def test_a_call_whole_and_streamed_by_anthropics_client(client: Any) -> None:
    answer = client.messages.create(**CALL)
    (call,) = answer.content
    assert call.type == "tool_use"
    assert (call.name, list(call.input), answer.stop_reason) == ("now", ["utc"], "tool_use")
    count = client.messages.count_tokens(
        model="tiny", messages=HI, tools=CALL["tools"], tool_choice=CALL["tool_choice"]
    )
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    with client.messages.stream(**CALL) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    turns = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(
        **{**CALL, "messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 4}
    )
    assert again.content[0].type == "text"


def test_texts_by_the_async_client(roomy: LiveServer, anthropic: ModuleType) -> None:
    arguments: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 5,
        "messages": HI,
        "extra_body": GREEDY,
    }

    async def both() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=roomy.url, api_key="unused") as client:
            answer = await client.messages.create(**arguments)
            async with client.messages.stream(**arguments) as stream:
                streamed = "".join([text async for text in stream.text_stream])
            return answer.content[0].text, streamed

    whole, streamed = asyncio.run(both())
    assert whole == streamed != ""


def test_errors_have_anthropics_form(roomy: LiveServer, client: Any, anthropic: ModuleType) -> None:
    with pytest.raises(anthropic.BadRequestError, match="did you mean 'temperature'"):
        client.messages.create(model="tiny", max_tokens=4, messages=HI, extra_body={"temprature": 1})
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        client.messages.create(model="claude", max_tokens=4, messages=HI)
    answer = roomy.http.get(URL)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.text == (
        '{"type":"error","error":{"type":"invalid_request_error",'
        '"message":"GET is not possible here, only POST"}}'
    )


def test_keys_pings_and_an_error_in_a_stream(
    serve_tiny: Callable[..., LiveServer], anthropic: ModuleType
) -> None:
    server = serve_tiny(api_key=KEY, sse_keep_alive_s=0.01)
    slow(server)
    refused = server.post(URL, ask()).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")
    engine = server.loop.engine
    launch = engine.runner.launch

    def broken(step: object) -> object:
        engine.runner.launch = launch  # type: ignore[method-assign]
        raise RuntimeError

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        stream = client.messages.create(
            model="tiny", max_tokens=400, messages=HI, stream=True, extra_body=GREEDY
        )
        next(stream)
        engine.runner.launch = broken  # type: ignore[method-assign]
        with pytest.raises(anthropic.APIStatusError, match="the model step failed"):
            list(stream)

    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    with server.http.stream("POST", URL, json=ask(stream=True), headers=headers) as answer:
        assert told("ping") in answer.read().decode()


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://192.0.2.1/a.png"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": []}]}, "content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "got 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0]: Object missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]}, "field `x`"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "got 'tool_use'"),
        ({"system": [IMAGE]}, "system[0]: expected a block of type text, got 'image'"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "computer_20250124"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "has a name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "any", "name": "now"}}, "has a name"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"thinking": {"type": "on"}}, "thinking"),
        ({"output_config": {"effort": "least"}}, "output_config.effort"),
        ({"alphas": ["x"]}, "unknown field 'alphas'"),
    ],
    ids=range(17),
)
def test_what_is_refused(roomy: LiveServer, fields: dict[str, Any], message: str) -> None:
    body = {name: value for name, value in ask(**fields).items() if value is not None}
    answer = roomy.post(URL, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]
