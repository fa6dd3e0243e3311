"""/v1/responses as coding agents use it: namespaces, texts, sealed reasoning, histories, failures."""

import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from http_helpers import LiveServer
from tool_cases import SHOWN

from octavo.server.api.anthropic.signature import signed

URL = "/v1/responses"
PATH = {
    "type": "object",
    "properties": {"path": {"const": "a.py"}},
    "required": ["path"],
    "additionalProperties": False,
}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": PATH, "strict": False}
TEXT = '*** Begin\n+say("hi\\n")\t😀\n*** End'
GRAMMAR = "start: " + " ".join(json.dumps(line) + ' "\\n"' for line in TEXT.split("\n")[:-1]) + ' "*** End"'
PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [READ, PATCH]}
ASK = {
    "input": [
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    ]
}
# What an agent sends beside its conversation, whatever the model.
AGENT: dict[str, Any] = {
    **ASK,
    "model": "tiny",
    "instructions": "Mend the program.",
    "tools": [
        FILES,
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "text": {"verbosity": "low"},
    "store": False,
    "stream": True,
    "prompt_cache_key": "k",
    "client_metadata": {"turn_id": "t"},
    "access_programs": {"cyber": "standard"},
}


def events(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(URL, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    found = [json.loads(line) for line in lines]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_an_agents_body_is_taken_and_what_is_left_out_is_named(roomy: LiveServer) -> None:
    answer = roomy.post(URL, {**AGENT, "max_output_tokens": 2})
    assert answer.status_code == 200, answer.text
    named = [
        "client_metadata",
        "access_programs",
        "prompt_cache_key",
        "tool_search",
        "web_search",
        "verbosity",
        "summary",
    ]
    assert [name for name in named if name not in answer.headers["x-octavo-left-out"]] == []


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "patch"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "patch"}, {"type": "mcp"}],
        },
    ],
)
def test_a_text_of_a_tool_whole_and_streamed(
    roomy: LiveServer, openai: ModuleType, choice: dict[str, Any]
) -> None:
    tools = [FILES, {"type": "web_search"}]
    asked = {"model": "tiny", **ASK, "tools": tools, "tool_choice": choice, "max_output_tokens": 400}
    asked["parallel_tool_calls"] = False
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="unused", max_retries=0) as client:
        (call,) = client.responses.create(**asked).output
        assert (call.type, call.namespace, call.name, call.input) == (
            "custom_tool_call",
            "mcp__files",
            "patch",
            TEXT,
        )
        with client.responses.stream(**asked) as stream:
            told = list(stream)
        (streamed,) = stream.get_final_response().output
        assert (streamed.input, streamed.namespace) == (TEXT, "mcp__files")
        deltas = [event.delta for event in told if event.type == "response.custom_tool_call_input.delta"]
        assert len(deltas) > 3
        assert "".join(deltas) == TEXT
        (done,) = [event.input for event in told if event.type == "response.custom_tool_call_input.done"]
        assert done == TEXT
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
        turns = [*ASK["input"], call.to_dict(), result]
        again = client.responses.create(model="tiny", input=turns, tools=tools, max_output_tokens=2)
        assert again.output


def test_a_function_of_a_namespace_is_called_by_its_own_name(roomy: LiveServer) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}
    asked = {**AGENT, "tool_choice": choice, "max_output_tokens": 300, "parallel_tool_calls": False}
    done = events(roomy, asked)[-1]["response"]
    (call,) = done["output"]
    assert (call["namespace"], call["name"], json.loads(call["arguments"])) == (
        "mcp__files",
        "read",
        {"path": "a.py"},
    )
    assert done["tools"][0]["tools"][0]["name"] == "read"


def test_tools_that_come_as_an_item_are_tools(roomy: LiveServer) -> None:
    more = {
        "type": "additional_tools",
        "id": "at_1",
        "role": "developer",
        "tools": [FILES, {"type": "web_search"}],
    }
    choice = {"type": "function", "name": "read"}
    for name in ("functions", "mcp__files"):
        item = {**more, "tools": [{**FILES, "name": name}, {"type": "web_search"}]}
        asked = {"input": [item, *ASK["input"]], "tool_choice": choice, "max_output_tokens": 300}
        answer = roomy.post(URL, asked)
        (call,) = answer.json()["output"]
        assert (call["namespace"], call["name"]) == (name, "read")
        assert answer.headers["x-octavo-left-out"] == "tools[] web_search"
    wrong = roomy.post(URL, {"input": [{**more, "tools": [{"type": "telepathy"}]}, *ASK["input"]]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input[0].tools")


def test_a_form_of_the_text_beside_a_call_that_must_be_made(roomy: LiveServer) -> None:
    """instructor sends both: the call is held to its schema, and there is no text."""
    form = {
        "type": "json_schema",
        "name": "x",
        "schema": {"type": "object", "properties": {"a": {"const": 1}}},
    }
    asked = {**ASK, "tools": [READ], "text": {"format": form}, "max_output_tokens": 300}
    (call,) = roomy.post(URL, {**asked, "tool_choice": "required", "parallel_tool_calls": False}).json()[
        "output"
    ]
    assert json.loads(call["arguments"]) == {"path": "a.py"}


@pytest.fixture
def thinking(serve_template: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    server = serve_template(SHOWN, reasoning_parser="think")
    yield server
    server.assert_drained()


def test_sealed_reasoning_comes_back(thinking: LiveServer) -> None:
    asked = {**AGENT, "tools": [], "temperature": 0, "max_output_tokens": 40}
    told = events(thinking, asked)
    item = told[-1]["response"]["output"][0]
    assert item["type"] == "reasoning"
    text = item["content"][0]["text"]
    assert item["encrypted_content"] == signed(text, carries=True)
    kinds = [event["type"] for event in told if event.get("output_index") == 0]
    assert kinds[:2] == ["response.output_item.added", "response.content_part.added"]
    assert kinds[-3:] == [
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    whole = thinking.post(URL, {**asked, "stream": False, "include": []}).json()["output"][0]
    assert "encrypted_content" not in whole


def prompt_tokens(server: LiveServer, *reasoning: dict[str, Any]) -> int:
    said = {"type": "message", "role": "assistant", "content": "Yes."}
    items = [*ASK["input"], *reasoning, said, *ASK["input"]]
    answer = server.post(URL, {"input": items, "max_output_tokens": 1})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["input_tokens"]


def test_only_what_this_server_has_sealed_is_read(thinking: LiveServer) -> None:
    sealed = signed("I thought of it.", carries=True)
    none = prompt_tokens(thinking)
    shown = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I thought of it."}],
    }
    full = prompt_tokens(thinking, {**shown, "encrypted_content": "whatever"})
    assert full > none
    assert (
        prompt_tokens(
            thinking, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed}
        )
        == full
    )
    for wrong in ("", "b3BhcXVl", sealed[:-8] + "AAAAAAA=", "gAAAA_other-server", "é"):
        assert (
            prompt_tokens(thinking, {"type": "reasoning", "summary": [], "encrypted_content": wrong}) == none
        )


HISTORY = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    *ASK["input"],
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
    {
        "type": "function_call",
        "name": "read",
        "namespace": "mcp__files",
        "arguments": "{}",
        "call_id": "a",
        "id": "fc_1",
    },
    {
        "type": "function_call_output",
        "call_id": "a",
        "output": [{"type": "input_text", "text": "x"}],
        "name": "read",
    },
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    },
    {
        "type": "custom_tool_call",
        "name": "patch",
        "input": TEXT,
        "call_id": "b",
        "status": "completed",
        "caller": None,
    },
    {"type": "custom_tool_call_output", "call_id": "b", "output": "Done.", "id": "ctco_1"},
    {
        "type": "message",
        "role": "assistant",
        "phase": "final_answer",
        "content": [{"type": "output_text", "text": "Ok"}],
    },
    {"role": "assistant", "content": "And more."},
]


def test_items_of_agents_are_history(roomy: LiveServer) -> None:
    answer = roomy.post(URL, {**AGENT, "input": [*HISTORY, *ASK["input"]], "max_output_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert "input[] web_search_call" in answer.headers["x-octavo-left-out"]
    assert "input[].phase" in answer.headers["x-octavo-left-out"]
    for end in range(len(HISTORY) + 1):
        assert roomy.post(URL, {"input": HISTORY[:end], "max_output_tokens": 1}).status_code == 200, end


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "msg_1"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [READ], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [READ], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [READ], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        (
            {"tools": [FILES], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            "tool_choice",
        ),
        ({"tools": [READ, {**FILES, "name": "functions"}]}, "tools"),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}]},
            "grammar",
        ),
        ({"input": [{"type": "function_call", "arguments": "{}", "call_id": "a"}]}, "input[0].name"),
        ({"input": [{"type": "custom_tool_call", "name": "p", "input": 5}]}, "input[0].input"),
        ({"reasoning": {"effort": "low", "mood": "good"}}, "mood"),
    ],
)
def test_what_is_wrong_is_named(roomy: LiveServer, fields: dict[str, Any], named: str) -> None:
    answer = roomy.post(URL, {**ASK, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert named in f"{error['param']} {error['message']}"


def test_a_failure_in_a_stream_is_told_twice(roomy: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("octavo.server.api.responses.response_route._Events.write", fail)
    told = events(roomy, {**ASK, "max_output_tokens": 3})
    failed, error = told[-2:]
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert error["type"] == "error"


def test_models_in_the_shapes_that_clients_look_for(roomy: LiveServer) -> None:
    found = roomy.http.get("/v1/models").json()
    assert (found["object"], [card["id"] for card in found["data"]], found["models"]) == (
        "list",
        ["tiny"],
        [],
    )


def test_custom_tools_of_chats(roomy: LiveServer, openai: ModuleType) -> None:
    custom = {
        "name": "patch",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": GRAMMAR}},
    }
    tools = [{"type": "custom", "custom": custom}, {"type": "function", "function": {"name": "now"}}]
    one = {"type": "custom", "custom": {"name": "patch"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    asked |= {"max_tokens": 400, "parallel_tool_calls": False}
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="unused", max_retries=0) as client:
        for choice in (one, allowed):
            message = client.chat.completions.create(**asked, tool_choice=choice).choices[0].message
            (call,) = message.tool_calls
            assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", TEXT)
        text = ""
        for chunk in client.chat.completions.create(**asked, tool_choice=one, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                text += delta.to_dict()["custom"]["input"]
        assert text == TEXT
        turns = [
            *asked["messages"],
            message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "Done."},
        ]
        assert client.chat.completions.create(**{**asked, "messages": turns, "max_tokens": 1}).choices


def test_limited_tools_may_be_left_alone_but_no_other_is_called(roomy: LiveServer) -> None:
    one = {"type": "function", "function": {"name": "now"}}
    tools = [one, {"type": "function", "function": {"name": "later"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [one]}}
    call = '<tool_call>\n{"name": "later", "arguments": {}}\n</tool_call>'
    bias = {
        str(roomy.post("/tokenize", {"prompt": c, "add_special_tokens": False}).json()["tokens"][0]): 20
        for c in set(call)
    }
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": allowed}
    for seed in range(4):
        body = {**asked, "max_tokens": 60, "logit_bias": bias, "seed": seed, "temperature": 1}
        message = roomy.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert all(call["function"]["name"] == "now" for call in message.get("tool_calls", []))
