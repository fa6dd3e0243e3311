"""Tools and reasoning over HTTP, also by OpenAI's clients. Grammars dictate what the tiny model writes."""

import asyncio
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from http_helpers import LiveServer, chat
from tiny_chat import TEMPLATE
from tool_cases import CLOCK, NAMED, SHOWN, TOOL, URL, collected, dictated, written

ADVERSARIAL = ['{a,b}{ "\\ </tool_call>', '<tool_call>{"name": "x"}😀é\n']


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_streamed_calls_are_the_whole_ones(roomy: LiveServer, text: str) -> None:
    arguments = {text: [1, {"a": "}"}]}
    body = dictated(f"I look.\n{written('sh', arguments)}\n{written('now', {})}", tools=[TOOL])
    choice = roomy.post(URL, body).json()["choices"][0]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls[0] == {"name": "sh", "arguments": json.dumps(arguments, ensure_ascii=False)}
    assert calls[1] == {"name": "now", "arguments": "{}"}
    assert choice["message"]["content"] == "I look."
    assert choice["finish_reason"] == "tool_calls"
    content, _, streamed, reason = collected(roomy.events(URL, body))
    assert [call["function"] for call in streamed] == calls
    assert (content, reason) == ("I look.", "tool_calls")
    assert len({call["id"] for call in streamed}) == 2


def test_a_call_begins_with_its_name_and_goes_on_in_pieces(roomy: LiveServer) -> None:
    events = roomy.events(URL, dictated(written("sh", {"cmd": "echo hello world"}), tools=[TOOL]))
    deltas = [choice["delta"] for event in events for choice in event["choices"]][1:]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "sh"
    assert calls[0]["id"].startswith("call_")
    assert len(calls) > 5
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert not any(delta.get("content") for delta in deltas)


def test_a_malformed_call_is_content(roomy: LiveServer) -> None:
    text = '<tool_call>{"name": "sh", "arguments": {"a": }}</tool_call>'
    body = dictated(text, tools=[TOOL])
    choice = roomy.post(URL, body).json()["choices"][0]
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    content, _, _, reason = collected(roomy.events(URL, body))
    assert (content, reason) == (text, "stop")


def test_without_tools_and_with_choice_none_calls_are_text(roomy: LiveServer) -> None:
    text = written("now", {})
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}):
        message = roomy.post(URL, dictated(text, **fields)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": text}


def test_only_one_call_without_parallel_calls(roomy: LiveServer) -> None:
    body = dictated(written("f", {"a": 1}) + written("g", {}), tools=[TOOL], parallel_tool_calls=False)
    calls = roomy.post(URL, body).json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["f"]
    assert len(collected(roomy.events(URL, body))[2]) == 1


def test_a_call_that_broke_off_is_not_the_one_call(roomy: LiveServer) -> None:
    broken = '<tool_call>{"name": "sh", "arguments": {"a": }}</tool_call>'
    body = dictated(
        broken + written("now", {"a": 1}) + written("g", {}), tools=[TOOL], parallel_tool_calls=False
    )
    (call,) = roomy.post(URL, body).json()["choices"][0]["message"]["tool_calls"]
    content, _, streamed, reason = collected(roomy.events(URL, body))
    assert [one["function"]["name"] for one in streamed] == ["sh", "now"]
    assert streamed[1]["function"] == call["function"]
    assert (content, reason) == (broken, "tool_calls")


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
def test_a_required_call_is_made_by_a_random_model(
    serve_template: Callable[..., LiveServer], parser: str
) -> None:
    server = serve_template(tool_call_parser=parser)
    fields = {"tools": [TOOL, CLOCK], "parallel_tool_calls": False, "temperature": 1, "seed": 5}
    # Ends are likelier than all else, or a random model would write white space for long.
    bias = {str(3 + ord(character)): 20 for character in '"}'}
    body = chat("Hi", max_tokens=250, logit_bias=bias, **fields)
    for choice, names in (("required", ("now", "get_weather")), (NAMED, ("get_weather",))):
        found = server.post(URL, {**body, "tool_choice": choice}).json()["choices"][0]
        assert found["finish_reason"] == "tool_calls", found
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        assert arguments == {} if call["function"]["name"] == "now" else arguments["unit"] in "CF"
        assert found["message"]["content"] is None
        *_, streamed, reason = collected(server.events(URL, {**body, "tool_choice": choice}))
        assert [one["function"] for one in streamed] == [call["function"]]
        assert reason == "tool_calls"
    server.assert_drained()


def test_n_answers_have_calls_of_their_own(roomy: LiveServer) -> None:
    fields = {"tools": [TOOL], "tool_choice": NAMED, "temperature": 1, "seed": 1}
    events = roomy.events(URL, chat("Hi", max_tokens=250, n=2, **fields))
    for index in range(2):
        mine = [
            {"choices": [choice]}
            for event in events
            for choice in event["choices"]
            if choice["index"] == index
        ]
        _, _, calls, reason = collected(mine)
        assert json.loads(calls[0]["function"]["arguments"])["unit"] in "CF"
        assert reason == "tool_calls"


def test_a_form_of_content_leaves_calls_possible(roomy: LiveServer) -> None:
    form = {"structured_outputs": {"choice": ["yes", "no"]}, "tools": [CLOCK], "parallel_tool_calls": False}
    found = set()
    for seed in range(5):
        message = roomy.post(URL, chat("Hi", max_tokens=100, temperature=2, seed=seed, **form)).json()[
            "choices"
        ][0]["message"]
        found.add(message["content"])
        assert message["content"] in ("yes", "no") or message["tool_calls"][0]["function"]["name"] == "now"
    assert None in found
    assert len(found) > 1


def function(**fields: Any) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


DEEP = json.loads('{"a":' * 40 + "1" + "}" * 40)
BAD_PATTERN = {"properties": {"a": {"type": "string", "pattern": "(("}}}
BAD_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
OTHER = {"type": "function", "function": {"name": "other"}}
REFUSED: list[tuple[str, dict]] = [
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "always"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": OTHER}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "custom", "function": {"name": "x"}}}),
    ("tools", {"tools": [TOOL, TOOL]}),
    ("tools", {"tools": [{"type": "custom", "function": {"name": "x"}}]}),
    ("tools", {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]}),
    ("tools", {"tools": [function(name="a b")]}),
    ("tools", {"tools": [function(name="")]}),
    ("tools", {"tools": [function(color=1)]}),
    ("tools", {"tools": [function(parameters={"type": "array"})]}),
    ("tools", {"tools": [function(parameters=DEEP)]}),
    ("tools", {"tools": [CLOCK] * 129}),
    ("tools", {"tools": "x"}),
    ("tools", {"tools": [function(parameters={"properties": 5})], "tool_choice": "required"}),
    ("grammar", {"tools": [function(parameters=BAD_PATTERN)], "tool_choice": "required"}),
    ("messages", {"messages": [BAD_CALL]}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("include_reasoning", {"include_reasoning": False}),
]


@pytest.mark.parametrize(("field", "fields"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(roomy: LiveServer, field: str, fields: dict) -> None:
    response = roomy.post(URL, chat("Hi", **fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert field in f"{error['param']} {error['message']}", error


@pytest.mark.parametrize(
    ("template", "parser"), [(TEMPLATE, "none"), (SHOWN.replace("tool_call>", "call>"), "auto")]
)
def test_tools_are_refused_where_their_calls_cannot_be_read(
    serve_template: Callable[..., LiveServer], template: str, parser: str
) -> None:
    server = serve_template(template, tool_call_parser=parser)
    response = server.post(URL, chat("Hi", tools=[TOOL]))
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]
    assert server.post(URL, chat("Hi", tools=[TOOL], tool_choice="none")).status_code == 200


def ask(text: str) -> dict[str, Any]:
    """Arguments for OpenAI's client: the answer is dictated."""
    body = dictated(text, tools=[TOOL])
    return {"model": "tiny", "extra_body": {"structured_outputs": body.pop("structured_outputs")}, **body}


def test_openais_client(roomy: LiveServer, openai: ModuleType) -> None:
    body = ask(f"Hm.\n{written('get_weather', {'city': '{a,b}'})}")
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="unused", max_retries=0) as client:
        message = client.chat.completions.create(**body).choices[0].message
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == '{"city": "{a,b}"}'
        with client.chat.completions.stream(**body) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "Hm."
        assert final.message.tool_calls[0].function.arguments == '{"city": "{a,b}"}'
        # What the client got goes back as it is.
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C"}
        turns = [*body["messages"], message.model_dump(exclude_none=True), result]
        again = client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL], max_tokens=4)
        assert again.choices[0].message.role == "assistant"


def test_openais_async_client_side_by_side(roomy: LiveServer, openai: ModuleType) -> None:
    async def call(client: Any, number: int) -> str:
        body = ask(written("get_weather", {"city": f"{number}😀"}))
        if number % 2:
            answer = await client.chat.completions.create(**body)
            return answer.choices[0].message.tool_calls[0].function.arguments
        pieces = []
        async for chunk in await client.chat.completions.create(**body, stream=True):
            for one in chunk.choices[0].delta.tool_calls or []:
                pieces.append(one.function.arguments)
        return "".join(pieces)

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{roomy.url}/v1", api_key="unused") as client:
            return await asyncio.gather(*[call(client, number) for number in range(4)])

    assert asyncio.run(many()) == [f'{{"city": "{number}😀"}}' for number in range(4)]
