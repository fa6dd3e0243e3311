"""Tools and reasoning over HTTP, also by OpenAI's clients. Grammars dictate what the tiny model writes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from http_helpers import LiveServer, chat
from tiny_chat import TEMPLATE, write_model

URL = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ADVERSARIAL = ['{a,b}{ "\\ </tool_call>', '<tool_call>{"name": "x"}😀é\n']


def dictated(text: str, **fields: Any) -> dict:
    """A chat whose answer is this text."""
    grammar = f"start: {json.dumps(text, ensure_ascii=False)}"
    return chat("Hi", max_tokens=300, structured_outputs={"grammar": grammar}, **fields)


def written(name: str, arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def collected(events: list[dict]) -> tuple[str, str, list[dict], str]:
    """What a client puts together: content, reasoning, calls, finish_reason."""
    content, reasoning, calls, reason = "", "", [], ""
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, reasoning, calls, reason


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


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm.",
        "refusal": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "é"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "18 C"}]},
]
SHOWN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.reasoning_content }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}: "
    "{{ call.function.arguments.city }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def serve_template(tmp_path: Path, serve_tiny: Callable[..., LiveServer]) -> Callable[..., LiveServer]:
    """Serve the tiny model with another chat template; pieces of its tokenizer may be renamed."""

    def serve(template: str = TEMPLATE, *, rename: tuple[str, str] = ("", ""), **options: Any) -> LiveServer:
        folder = write_model(tmp_path, max_model_len=4096)
        (folder / "chat_template.jinja").write_text(template)
        if rename[0]:
            text = (folder / "tokenizer.json").read_text().replace(*rename)
            (folder / "tokenizer.json").write_text(text)
        return serve_tiny({"model": str(folder), "num_blocks": 2048}, **options)

    return serve


def prompt_of(server: LiveServer, body: dict) -> str:
    answer = server.post(URL, {**body, "return_token_ids": True}).json()
    text = server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()
    return text["prompt"]


def test_the_template_gets_tools_and_history(serve_template: Callable[..., LiveServer]) -> None:
    server = serve_template(SHOWN)
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    prompt = prompt_of(server, chat("", messages=HISTORY, tools=[strict], max_tokens=1))
    assert json.dumps(TOOL) in prompt
    assert "Hm." in prompt
    assert "<tool_call>get_weather: é</tool_call>" in prompt
    assert "tool\n18 C" in prompt


def test_a_template_without_tools_gets_them_in_messages(roomy: LiveServer) -> None:
    prompt = prompt_of(roomy, chat("", messages=HISTORY, tools=[TOOL], max_tokens=1))
    assert json.dumps(TOOL) in prompt
    assert written("get_weather", {"city": "é"}) in prompt
    assert "user\n<tool_response>\n18 C\n</tool_response>" in prompt


def test_reasoning_is_a_field_of_its_own(serve_template: Callable[..., LiveServer]) -> None:
    server = serve_template(SHOWN)
    text = f"Hm 😀.\n</think>\n\nYes.{written('now', {})}"
    body = dictated(text, tools=[CLOCK])
    message = server.post(URL, body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm 😀."
    assert message["content"] == "Yes."
    assert message["tool_calls"][0]["function"]["name"] == "now"
    content, reasoning, calls, reason = collected(server.events(URL, body))
    assert (content, reasoning, len(calls), reason) == ("Yes.", "Hm 😀.", 1, "tool_calls")
    cut = server.post(URL, {**body, "max_tokens": 3}).json()["choices"][0]
    assert cut["message"] == {"role": "assistant", "content": None, "reasoning_content": "Hm "[:2]}
    assert cut["finish_reason"] == "length"


def test_forms_and_required_calls_come_after_reasoning(serve_template: Callable[..., LiveServer]) -> None:
    server = serve_template(SHOWN, rename=("<|endoftext|>", "</think>"))
    # The end of the reasoning is one token, and among the likeliest.
    bias = {"0": 4}
    reasoned = ""
    for fields in (
        {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False},
        {"structured_outputs": {"choice": ["yes"]}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}}},
    ):
        body = chat("Hi", max_tokens=200, temperature=1, seed=3, logit_bias=bias, **fields)
        choice = server.post(URL, body).json()["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] in ("stop", "tool_calls"), choice
        reasoned += message.get("reasoning_content", "")
        assert message["content"] in ("yes", '"yes"', None)
        assert message["content"] or message["tool_calls"][0]["function"]["name"] == "now"
    assert reasoned


def test_markers_that_are_special_tokens_are_read(serve_template: Callable[..., LiveServer]) -> None:
    """As in Mistral's vocabularies, whose markers no decoder shows by itself."""
    server = serve_template(TEMPLATE + "{{ tools }}[TOOL_CALLS]", rename=("<|endoftext|>", "[TOOL_CALLS]"))
    body = chat("Hi", max_tokens=200, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False)
    (call,) = server.post(URL, body).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}
    assert len(call["id"]) == 9
    assert collected(server.events(URL, body))[2][0]["function"] == call["function"]


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
    ("tool_choice", {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}}),
    ("tools", {"tools": [TOOL, TOOL]}),
    ("tools", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("tools", {"tools": [function(name="a b")]}),
    ("tools", {"tools": [function(name="")]}),
    ("tools", {"tools": [function(color=1)]}),
    ("tools", {"tools": [function(parameters={"type": "array"})]}),
    ("tools", {"tools": [function(parameters=DEEP)]}),
    ("tools", {"tools": [CLOCK] * 129}),
    ("tools", {"tools": "x"}),
    ("grammar", {"tools": [function(parameters={"properties": 5})], "tool_choice": "required"}),
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
