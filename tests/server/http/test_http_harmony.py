"""Harmony over HTTP: what the template renders, what comes back, whole and streamed, on all routes."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import openai
import pytest
from conftest import TINY, served
from http_helpers import LiveServer, chat
from msgspec import to_builtins
from test_http_agents import AGENT, ASK, FILES, HISTORY, TEXT
from tiny_harmony import PIECES, TOOL, write_harmony_model

from octavo import EngineConfig
from octavo.server.api.responses.response_input import parse_response

URL = "/v1/chat/completions"
START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL = PIECES
NAMED = {"type": "function", "function": {"name": "get_weather"}}
THOUGHT = (CHANNEL, "analysis", MESSAGE, "Hm <|call|> 😀.", END, START, "assistant")
CALLED = (CHANNEL, "commentary to=functions.get_weather ", CONSTRAIN, "json", MESSAGE)
ARGUMENTS = '{"city": "{a,b}\\"é"}'


@pytest.fixture(scope="module")
def harmony_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_harmony_model(tmp_path_factory.mktemp("harmony"))
    config = EngineConfig.from_dict({"model": str(folder), **TINY, "num_blocks": 2048})
    yield from served(config, "oss")


@pytest.fixture
def oss(harmony_server: LiveServer) -> Iterator[LiveServer]:
    """A tiny model that writes harmony; afterwards no request and no block may be left."""
    yield harmony_server
    harmony_server.assert_drained()


def special(server: LiveServer, piece: str) -> int:
    (token_id,) = server.post("/tokenize", {"prompt": piece, "add_special_tokens": False}).json()["tokens"]
    return token_id


def dictated(server: LiveServer, parts: Iterable[str], **fields: Any) -> dict:
    """A chat whose answer is this; special tokens stand by themselves."""
    rules = [f"<[{special(server, part)}]>" if part in PIECES else json.dumps(part) for part in parts]
    grammar = f"start: {' '.join(rules)}"
    return chat("Hi", max_tokens=300, structured_outputs={"grammar": grammar}, **fields)


def collected(events: list[dict]) -> tuple[dict[str, Any], str]:
    """The message that a client puts together, and the finish_reason."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for choice in (choice for event in events for choice in event["choices"]):
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                message["tool_calls"].append(dict(call["function"]))
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return message, reason


def whole(choice: dict) -> tuple[dict[str, Any], str]:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    found = {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", "")}
    return {"role": "assistant", **found, "tool_calls": calls}, choice["finish_reason"]


@pytest.mark.parametrize(
    ("parts", "content", "calls", "reason"),
    [
        ((*THOUGHT, CHANNEL, "final", MESSAGE, "Yes.", RETURN), "Yes.", [], "stop"),
        ((*THOUGHT, *CALLED, ARGUMENTS, CALL), "", [ARGUMENTS], "tool_calls"),
        ((*THOUGHT, *CALLED, '{"city": }', CALL), '{"city": }', [], "stop"),
        ((*THOUGHT, CONSTRAIN, "json", MESSAGE, "Yes."), "Yes.", [], "stop"),
    ],
)
def test_streamed_is_whole(oss: LiveServer, parts: tuple, content: str, calls: list, reason: str) -> None:
    body = dictated(oss, parts, tools=[TOOL])
    found, why = whole(oss.post(URL, body).json()["choices"][0])
    assert found["reasoning_content"] == "Hm <|call|> 😀."
    assert (found["content"], why) == (content, reason)
    assert found["tool_calls"] == [{"name": "get_weather", "arguments": text} for text in calls]
    for interval in (1, 7):
        streamed, why = collected(oss.events(URL, {**body, "stream_interval": interval}))
        if not calls:
            # A stream cannot take back what it told of a call that broke off: it is no JSON.
            for call in streamed["tool_calls"]:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(call["arguments"])
            streamed["tool_calls"] = []
        assert (streamed, why) == (found, reason)


def test_a_stop_string_cuts_content_between_its_special_tokens(oss: LiveServer) -> None:
    parts = (*THOUGHT, CHANNEL, "final", MESSAGE, "one two", RETURN)
    for stop, content in (("two", "one "), (["e t", "zzz"], "on"), ("<|ret", "one two")):
        body = dictated(oss, parts, stop=stop)
        found = whole(oss.post(URL, body).json()["choices"][0])
        if stop == "two":
            assert found[0]["reasoning_content"] == "Hm <|call|> 😀."
        assert found[0]["content"] == content
        assert collected(oss.events(URL, body)) == found


def test_whatever_a_random_model_writes_is_an_answer(oss: LiveServer) -> None:
    """Special tokens in any order, streamed and whole."""
    bias = {str(special(oss, piece)): 4 + (piece == MESSAGE) for piece in PIECES}
    kinds = set()
    for seed in range(3):
        body = chat("Hi", max_tokens=48, temperature=1, seed=seed, logit_bias=bias, ignore_eos=True)
        body |= {"tools": [TOOL], "n": 2}
        answer = oss.post(URL, body).json()
        events = oss.events(URL, body)
        for index in range(2):
            mine = [{"choices": [c for c in event["choices"] if c["index"] == index]} for event in events]
            found = whole(answer["choices"][index])
            assert collected(mine) == found
            kinds |= {name for name in ("content", "reasoning_content") if found[0][name]}
    assert "content" in kinds


def test_required_and_named_calls_are_made_by_a_random_model(oss: LiveServer) -> None:
    # Ends are likelier than all else, or a random model would write for long.
    likely = {'"': 40, "}": 40, "c": 20, " ": 20}
    bias = {str(3 + ord(character)): more for character, more in likely.items()}
    bias |= {str(special(oss, END)): 60}
    for choice in ("required", NAMED):
        body = chat("Hi", max_tokens=900, temperature=1, seed=7, logit_bias=bias, tools=[TOOL])
        body["tool_choice"] = choice
        found, reason = whole(oss.post(URL, body).json()["choices"][0])
        (call,) = found["tool_calls"]
        assert json.loads(call["arguments"])["unit"] in "CF"
        assert reason == "tool_calls"
    assert collected(oss.events(URL, body)) == (found, reason)


def test_a_form_of_content_holds_in_the_last_message(oss: LiveServer) -> None:
    bias = {str(special(oss, END)): 9}
    for form in ({"choice": ["yes"]}, {"json": {"const": "yes"}}):
        body = chat("Hi", max_tokens=900, temperature=1, seed=1, logit_bias=bias, structured_outputs=form)
        found, reason = whole(oss.post(URL, body).json()["choices"][0])
        assert found["content"].strip('"') == "yes"
        assert reason == "stop"


def prompt_of(server: LiveServer, **fields: Any) -> str:
    body = chat("Hi", max_tokens=1, return_token_ids=True, **fields)
    ids = server.post(URL, body).json()["prompt_token_ids"]
    return server.post("/detokenize", {"tokens": ids}).json()["prompt"]


def test_the_prompt_is_harmony(oss: LiveServer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "é"}'}}
    turn = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "18 C"}
    first = {"role": "user", "content": "Weather?"}
    prompt = prompt_of(oss, messages=[first, turn, result], tools=[TOOL], reasoning_effort="high")
    assert "Reasoning: high" in prompt
    assert "type get_weather = (_: {" in prompt
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json"
        '<|message|>{"city": "é"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"18 C"<|end|>'
        "<|start|>assistant"
    )
    second = {**call, "id": "b", "function": {"name": "get_weather", "arguments": "{}"}}
    several = [first, {**turn, "tool_calls": [call, second]}]
    several += [{**result, "content": "a"}, {**result, "tool_call_id": "b", "content": "b"}]
    prompt = prompt_of(oss, messages=[*several, first], tools=[TOOL])
    assert prompt.count("<|call|>") == 2
    assert prompt.index('"a"<|end|>') < prompt.index("{}<|call|>") < prompt.index('"b"<|end|>')
    assert prompt_of(oss, messages=several[:2], tools=[TOOL]).count("<|call|>") == 2
    both = prompt_of(oss, messages=[first, {**turn, "content": "I look."}, result], tools=[TOOL])
    assert "<|channel|>analysis<|message|>Hm.\nI look.<|end|>" in both


def test_a_message_that_is_continued_is_content(oss: LiveServer) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, "}]
    body = dictated(oss, ("and no.", RETURN), messages=turns)
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    body["messages"] = turns
    assert whole(oss.post(URL, body).json()["choices"][0])[0]["content"] == "and no."


def test_other_routes(oss: LiveServer) -> None:
    tool = {"type": "function", **TOOL["function"]}
    body = {"input": "Hi", "tools": [tool], "tool_choice": "required", "max_output_tokens": 48}
    items = oss.post("/v1/responses", body).json()["output"]
    assert {item["type"] for item in items} <= {"reasoning", "function_call", "message"}
    anthropic = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [anthropic], "max_tokens": 48}
    body["tool_choice"] = {"type": "any"}
    blocks = oss.post("/v1/messages", body).json()["content"]
    assert {block["type"] for block in blocks} <= {"thinking", "tool_use", "text"}


def test_an_agents_conversation_is_harmony(oss: LiveServer) -> None:
    """Namespaces and texts of history are the functions that the model knows, and custom tools come back."""
    agents = {"input": [*HISTORY, *ASK["input"]], "tools": [FILES]}
    chat_body = parse_response(json.dumps(agents).encode(), {}).chat
    tools = [to_builtins(tool) for tool in chat_body.tools or ()]
    prompt = prompt_of(oss, messages=chat_body.messages, tools=tools)
    assert "<|start|>assistant to=functions.mcp__files__read<|channel|>commentary json<|message|>{}" in prompt
    assert "type mcp__files__patch = (_: {" in prompt
    head = "<|start|>assistant to=functions.mcp__files__patch<|channel|>commentary json<|message|>"
    assert json.loads(prompt.partition(head)[2].partition("<|call|>")[0]) == {"input": TEXT}
    for stream in (False, True):
        body = {
            **AGENT,
            "model": None,
            "input": [*HISTORY, *ASK["input"]],
            "max_output_tokens": 4,
            "stream": stream,
        }
        assert oss.post("/v1/responses", body).status_code == 200
    text = {"type": "custom", "custom": {"name": "patch"}}
    head_of_call = (CHANNEL, "commentary to=functions.patch ", CONSTRAIN, "json", MESSAGE)
    body = dictated(oss, (*THOUGHT, *head_of_call, json.dumps({"input": TEXT}), CALL))
    body["tools"], body["tool_choice"] = [text], "auto"
    assert oss.post(URL, body).status_code == 400  # a custom tool is strict, beside a grammar of one's own


def test_openais_client_goes_round(oss: LiveServer) -> None:
    body = dictated(oss, (*THOUGHT, *CALLED, ARGUMENTS, CALL), tools=[TOOL])
    extra = {"structured_outputs": body.pop("structured_outputs")}
    with openai.OpenAI(base_url=f"{oss.url}/v1", api_key="unused", max_retries=0) as client:
        with client.chat.completions.stream(model="oss", extra_body=extra, **body) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls[0].function.arguments == ARGUMENTS
        turns = [*body["messages"], message.model_dump(exclude_none=True)]
        turns.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C"})
        again = client.chat.completions.create(model="oss", messages=turns, tools=[TOOL], max_tokens=4)
        assert again.choices[0].message.role == "assistant"


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_every_answer_comes_back(oss: LiveServer, step: int) -> None:
    """Cut at any token, whole or streamed, an answer is history."""
    parts = (
        *THOUGHT,
        CHANNEL,
        "commentary",
        MESSAGE,
        "I look.",
        END,
        START,
        "assistant",
        *CALLED,
        ARGUMENTS,
        CALL,
    )
    for most in [*range(1, 100, step), 300]:
        body = {**dictated(oss, parts, tools=[TOOL]), "max_tokens": most}
        whole = oss.post(URL, body).json()["choices"][0]["message"]
        streamed, _ = collected(oss.events(URL, body))
        calls = [{"id": f"c{n}", "function": call} for n, call in enumerate(streamed["tool_calls"])]
        for answer in (whole, {**streamed, "tool_calls": calls}):
            told = [
                {"role": "tool", "tool_call_id": call["id"], "content": "x"}
                for call in whole.get("tool_calls", [])
            ]
            turns = [{"role": "user", "content": "Hi"}, answer, *told, {"role": "user", "content": "Hi"}]
            found = oss.post(URL, {"messages": turns, "tools": [TOOL], "max_tokens": 1})
            assert found.status_code == 200, (answer, found.text)
