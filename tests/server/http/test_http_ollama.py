"""Ollama's API, with bodies as the ollama package sends them."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from http_helpers import LiveServer, chat, eventually
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_cases import SHOWN, TOOL, written

from octavo.sampling_params import SamplingParams, StructuredOutput
from octavo.server.api.ollama import ollama_input
from octavo.server.api.ollama.ollama_structs import GivenMessage
from octavo.server.api.sampling import Defaults, chat_params
from octavo.server.api.structs import ChatRequest

CALL = {"function": {"name": "f", "arguments": {}}}
GREEDY = {"temperature": 0, "num_predict": 8}


def ask(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, {"model": "tiny", "stream": False, "options": GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def lines(server: LiveServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={"model": "tiny", "options": GREEDY, **fields}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def test_a_chat_says_what_openai_s_says(live: LiveServer) -> None:
    expected = live.post("/v1/chat/completions", chat("Hi")).json()
    messages = [{"role": "user", "content": "Hi"}]
    found = ask(live, "/api/chat", messages=messages)
    assert found["message"] == {"role": "assistant", "content": expected["choices"][0]["message"]["content"]}
    assert (found["done"], found["done_reason"]) == (True, expected["choices"][0]["finish_reason"])
    assert found["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert found["eval_count"] == expected["usage"]["completion_tokens"] == 8
    assert 0 < found["eval_duration"] < found["total_duration"] < 60e9
    streamed = lines(live, "/api/chat", messages=messages, stream=True)
    assert "".join(line["message"]["content"] for line in streamed) == found["message"]["content"]
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["eval_count"] == 8


def test_generate_is_a_chat_of_one_message_or_raw(live: LiveServer) -> None:
    chatted = ask(
        live, "/api/chat", messages=[{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
    )
    found = ask(live, "/api/generate", prompt="Hi", system="Be")
    assert found["response"] == chatted["message"]["content"]
    completed = live.post("/v1/completions", {"prompt": "Hi", "temperature": 0, "max_tokens": 8}).json()
    assert ask(live, "/api/generate", prompt="Hi", raw=True)["response"] == completed["choices"][0]["text"]
    streamed = lines(live, "/api/generate", prompt="Hi", raw=True)
    assert "".join(line["response"] for line in streamed) == completed["choices"][0]["text"]
    long = ask(
        live,
        "/api/generate",
        prompt="Hi",
        raw=True,
        format="",
        suffix="",
        context=[],
        images=[],
        keep_alive="5m" + " " * 40_000,
    )
    assert long["response"] == completed["choices"][0]["text"]


def test_options_are_honoured_or_left_out_by_name(live: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    same = {"seed": 7, "temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "stop": ["x"]}
    same |= {"presence_penalty": 0.1, "frequency_penalty": 0.2}
    options = {**same, "num_predict": 12, "repeat_penalty": 1.2}
    fields = {**same, "max_tokens": 12, "repetition_penalty": 1.2}
    expected = live.post("/v1/chat/completions", chat("Hi", **fields)).json()["choices"][0]["message"][
        "content"
    ]
    body = {"model": "tiny:latest", "messages": messages, "stream": False, "keep_alive": 0}
    response = live.post(
        "/api/chat", {**body, "options": {**options, "num_ctx": 4096, "num_gpu": 1, "tfs_z": 1}}
    )
    assert response.json()["message"]["content"] == expected
    assert {*response.headers["x-octavo-left-out"].split(", ")} == {
        "keep_alive",
        "options.num_ctx",
        "options.num_gpu",
    }


@pytest.mark.parametrize("num", [-1, -2])
def test_as_many_tokens_as_fit(live: LiveServer, num: int) -> None:
    found = ask(live, "/api/generate", prompt="Hi", raw=True, options={"num_predict": num, "temperature": 0})
    assert found["eval_count"] > 30


def test_format_holds(live: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    found = ask(
        live,
        "/api/chat",
        messages=[{"role": "user", "content": "Hi"}],
        format=schema,
        options={"num_predict": 60},
    )
    assert json.loads(found["message"]["content"])["a"] in (1, 2)
    assert json.loads(
        ask(live, "/api/generate", prompt="Hi", format=schema, options={"num_predict": 60})["response"]
    )["a"] in (1, 2)


def test_a_raw_prompt_does_not_think(live: LiveServer) -> None:
    response = live.post("/api/generate", {"model": "tiny", "prompt": "Hi", "raw": True, "think": True})
    assert response.headers["x-octavo-left-out"] == "think"


def test_a_load_probe_is_answered_at_once(live: LiveServer) -> None:
    assert ask(live, "/api/chat", messages=[])["done_reason"] == "load"
    assert ask(live, "/api/generate", keep_alive=0) | {"created_at": ""} == {
        "model": "tiny", "created_at": "", "response": "", "done": True, "done_reason": "load",
    }  # fmt: skip


def test_calls_have_objects_and_results_find_them(
    monkeypatch: pytest.MonkeyPatch, serve_template: Callable[..., LiveServer]
) -> None:
    server = serve_template(SHOWN, tool_call_parser="hermes", reasoning_parser="think")
    call = {"name": "get_weather", "arguments": {"city": "Rome", "unit": "C"}}
    said = f"Hm.</think>\n\nI look. {written(**call)}\n{written(**call)}"

    def dictated(fields: ChatRequest, defaults: Defaults) -> SamplingParams:
        grammar = StructuredOutput(grammar=f"start: {json.dumps(said)}")
        return replace(chat_params(fields, defaults), structured=grammar, max_tokens=400)

    monkeypatch.setattr(ollama_input, "chat_params", dictated)
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "think": True}
    message = ask(server, "/api/chat", **fields)["message"]
    assert (message["content"].strip(), message["thinking"].strip()) == ("I look.", "Hm.")
    assert [one["function"] for one in message["tool_calls"]] == [call, call]
    streamed = lines(server, "/api/chat", **fields)
    calls = [one["function"] for line in streamed for one in line["message"].get("tool_calls", [])]
    assert calls == [call, call]
    assert "".join(line["message"].get("thinking", "") for line in streamed).strip() == "Hm."
    assert streamed[-1]["done_reason"] == "stop"
    results = [{"role": "tool", "tool_name": "get_weather", "content": text} for text in ("hot", "cold")]
    again = {**fields, "messages": [*fields["messages"], message, *results]}
    assert ask(server, "/api/chat", **again)["done"]
    server.assert_drained()


def test_results_find_the_calls_before_them() -> None:
    two = [CALL, {"function": {"name": "g"}, "id": "own"}]
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": two},
        {"role": "tool", "tool_name": "g"},
        {"role": "assistant", "tool_calls": two},
        *({"role": "tool", "tool_name": name} for name in ("g", "f", "f")),
        {"role": "tool", "tool_call_id": "x"},
    ]
    found = ollama_input._messages(msgspec.convert(turns, list[GivenMessage]))
    ids = [message.get("tool_call_id") for message in found if message["role"] == "tool"]
    assert ids == ["own", "own", "call_2_0", "call", "x"]


def test_most_calls_and_results_are_paired_in_a_moment() -> None:
    calls = {"role": "assistant", "tool_calls": [CALL] * 128}
    result = {"role": "tool", "tool_name": "g"}
    turns = msgspec.convert([*[calls] * 2048, *[result] * 2048], list[GivenMessage])
    begun = time.monotonic()
    ollama_input._messages(turns)
    assert time.monotonic() - begun < 8


def test_logprobs(live: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    expected = live.post("/v1/chat/completions", chat("Hi", logprobs=True, top_logprobs=2)).json()
    content = expected["choices"][0]["logprobs"]["content"]
    found = ask(live, "/api/chat", messages=messages, logprobs=True, top_logprobs=2)
    assert [one["token"] for one in found["logprobs"]] == [one["token"] for one in content]
    streamed = lines(live, "/api/chat", messages=messages, logprobs=True)
    assert [one["token"] for line in streamed for one in line.get("logprobs", [])] == [
        one["token"] for one in content
    ]


def test_what_the_server_has(live: LiveServer) -> None:
    (model,) = live.http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "tiny"
    assert model["size"] > 0
    assert live.http.get("/api/ps").json()["models"][0]["context_length"] > 0
    assert live.http.get("/api/version").json() == live.http.get("/version").json()
    shown = live.post("/api/show", {"model": "tiny"}).json()
    assert "completion" in shown["capabilities"]
    assert "<|im_start|>" in shown["template"]
    assert live.http.head("/").status_code == 200
    assert live.http.get("/", headers={"accept": "text/plain"}).text == "Ollama is running"
    assert "<html" in live.http.get("/", headers={"accept": "text/html,text/plain"}).text


TURN = {"messages": [{"role": "user", "content": "a"}]}
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/api/pull", {"model": "x"}, 400, "not supported"),
    ("/api/push", {"model": "x"}, 400, "not supported"),
    ("/api/create", {"model": "x"}, 400, "not supported"),
    ("/api/copy", {"source": "x", "destination": "y"}, 400, "not supported"),
    ("/api/blobs/sha256:0", {}, 404, "chat, generate"),
    ("/api/show", {"model": "other"}, 404, "no model"),
    ("/api/chat", {"model": "other"}, 404, "no model"),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("/api/generate", {"prompt": "a", "template": "b"}, 400, "template"),
    ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context"),
    ("/api/generate", {"prompt": "a", "images": ["aaaa"]}, 400, "images"),
    ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system"),
    ("/api/generate", {"prompt": "a" * 9000, "raw": True}, 400, "max_model_len"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aaaa"]}]}, 400, "images"),
    ("/api/chat", {**TURN, "options": {"mirostat": 1}}, 400, "mirostat"),
    ("/api/chat", {**TURN, "options": {"tempo": 1}}, 400, "tempo"),
    ("/api/chat", {**TURN, "options": {"temperature": -1}}, 400, "temperature"),
    ("/api/chat", {"messages": [{"role": "x", "content": "a"}]}, 400, "role"),
    ("/api/chat", {**TURN, "tools": [{"type": "y"}]}, 400, "tools[0]"),
    ("/api/chat", {**TURN, "format": "xml"}, 400, "format"),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, 400, "tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "word"), REFUSED)
def test_refusals_are_in_ollama_s_form(
    live: LiveServer, path: str, body: dict, status: int, word: str
) -> None:
    response = live.post(path, {"model": "tiny", **body})
    assert response.status_code == status, response.text
    assert [*response.json()] == ["error"]
    assert word in response.json()["error"]


def test_delete_is_refused(live: LiveServer) -> None:
    assert live.http.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 400


def test_a_client_that_leaves_aborts(slow_live: LiveServer) -> None:
    body = {"model": "tiny", "prompt": "Hi", "raw": True, "options": {"num_predict": -1}}
    with slow_live.http.stream("POST", "/api/generate", json=body) as answer:
        next(answer.iter_lines())
    eventually(lambda: slow_live.loop.stats().num_live == 0, 10)


texts = st.text(max_size=6)
values = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.floats(-1, 2), texts, st.lists(texts, max_size=2)
)
names = [
    "num_predict",
    "temperature",
    "stop",
    "seed",
    "top_k",
    "num_ctx",
    "repeat_penalty",
    "repeat_last_n",
    "x",
]
options = st.dictionaries(st.sampled_from(names), values, max_size=3)
arguments = st.one_of(st.dictionaries(texts, values), values)
functions = st.fixed_dictionaries({"name": texts, "arguments": arguments})
calls = st.lists(st.fixed_dictionaries({"function": functions}), max_size=2)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
        optional={
            "content": values,
            "thinking": values,
            "tool_calls": calls,
            "tool_name": values,
            "images": values,
        },
    ),
    max_size=4,
)
short = options.map(lambda found: {"num_predict": 2, **found})
fields = [
    "prompt",
    "system",
    "raw",
    "stream",
    "think",
    "format",
    "logprobs",
    "top_logprobs",
    "keep_alive",
    "suffix",
]
bodies = st.fixed_dictionaries(
    {"model": st.just("tiny"), "options": st.one_of(short, values)},
    optional={
        **dict.fromkeys(fields, values),
        "messages": messages,
        "tools": st.lists(st.dictionaries(texts, values), max_size=1),
    },
)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(path=st.sampled_from(["/api/chat", "/api/generate", "/api/show"]), body=bodies)
def test_random_bodies_of_ollama(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = live.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code < 500, (response.text, body)
    assert response.status_code == 200 or response.json()["error"]
