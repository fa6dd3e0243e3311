"""/v1/messages as coding agents use it: their bodies, thinking that returns, errors they try again after."""

import asyncio
import importlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from aiohttp import web
from http_helpers import LiveServer, eventually, slow
from tiny_chat import TEMPLATE
from typed_samples import samples

from octavo.router import Fleet, Marks, Report
from octavo.server.api.anthropic.signature import carried
from octavo.server.replicas.proxy import ClientRequest, Link

URL, COUNT = "/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
EPHEMERAL = {"type": "ephemeral"}
# A chat template that takes the system's turn only at the beginning, as newer ones do.
FIRST_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + TEMPLATE
)
THINKS = TEMPLATE.replace("{{ message.content", "{{ message.reasoning_content }}{{ message.content").replace(
    "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
)


def tool(name: str, **fields: Any) -> dict[str, Any]:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
    return {"name": name, "description": f"Does {name}", "input_schema": schema, **fields}


def turn_of(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def session(num_rounds: int) -> dict[str, Any]:
    """An agent's body after so many calls: tools enter its list late, and its marks for a cache move."""
    messages: list[dict[str, Any]] = [
        turn_of("user", text("<reminder>\nBe brief.\n</reminder>\n"), text("Repair add.py.")),
        {"role": "system", "content": "# Environment\nA folder of files."},
    ]
    for number in range(num_rounds):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "Find", "input": {"query": str(number)}}
        thinking = {"type": "thinking", "thinking": f"I look {number} times.", "signature": "c2lnbmVk"}
        reference = {"type": "tool_reference", "tool_name": f"Later{number}"}
        result = {
            "tool_use_id": f"toolu_{number}",
            "type": "tool_result",
            "content": [reference],
            "is_error": False,
        }
        messages += [turn_of("assistant", thinking, call), turn_of("user", result)]
        messages.append({"role": "system", "content": "<tokens>9000 left</tokens>"})
    messages[-1] = turn_of("system", text(messages[-1]["content"], cache_control=EPHEMERAL))
    late = [tool(f"Later{number}", defer_loading=True) for number in range(num_rounds)]
    return {
        "model": "tiny",
        "max_tokens": 64_000,
        "stream": True,
        "system": [text("You repair files."), text("Use your tools.", cache_control=EPHEMERAL)],
        "messages": messages,
        "tools": [tool("Edit"), *late, tool("Placeholder", defer_loading=True), tool("Find")],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "somebody"},
    }


def streamed(server: LiveServer, body: dict[str, Any]) -> tuple[list[dict[str, Any]], httpx.Headers]:
    """Return the events of a body's answer, which must be whole, and its headers."""
    with server.http.stream("POST", URL, json=body, headers=HEADERS) as answer:
        lines = answer.read().decode().splitlines()
    assert answer.status_code == 200, lines
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop"), events
    return events, answer.headers


@pytest.mark.parametrize("template", [TEMPLATE, FIRST_SYSTEM], ids=["any system", "first system"])
def test_an_agents_session_finds_the_tokens_of_its_last_turn(
    serve_template: Callable[..., LiveServer], template: str
) -> None:
    server = serve_template(template)
    before = 0
    for num_rounds in range(4):
        body = session(num_rounds) | {"max_tokens": 2}
        events, headers = streamed(server, body)
        assert headers["x-octavo-left-out"].split(", ")[:2] == [
            "metadata",
            "messages[].content[].cache_control",
        ]
        usage = events[-2]["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert server.post(COUNT, body).json()["input_tokens"] == total
        # All blocks of 4 tokens that were full, but for what opens the answer.
        assert usage["cache_read_input_tokens"] >= 0.95 * before
        before = total
    server.assert_drained()


def test_an_answer_may_take_all_the_room_there_is(serve_tiny: Callable[..., LiveServer]) -> None:
    """Agents ask for more tokens than any small model has."""
    server = serve_tiny()
    ids = [{"role": "user", "content": "x" * 480}]
    events, _ = streamed(server, {"messages": ids, "max_tokens": 64_000, "temperature": 0, "stream": True})
    assert events[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"
    refused = server.post(URL, {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 1})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    # Agents shorten the conversation when they read this.
    assert error["message"].startswith("prompt is too long: 619 tokens > 511 maximum")


def test_late_turns_of_the_system_are_shown_where_a_template_takes_none(
    serve_template: Callable[..., LiveServer],
) -> None:
    server = serve_template(FIRST_SYSTEM)
    system, user = {"role": "system", "content": "A"}, {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Yes"}

    def prompt(*messages: dict[str, Any]) -> str:
        found = server.post("/tokenize", {"messages": messages})
        assert found.status_code == 200, found.text
        return server.post("/detokenize", {"tokens": found.json()["tokens"]}).json()["prompt"]

    late = {"role": "system", "content": "B"}
    shown = "<|im_start|>user\nHi\n\n<system>\nB\n</system><|im_end|>\n"
    assert shown in prompt(system, user, late)
    assert prompt(system, user, late, answer).startswith(prompt(system, user, late)[: -len("assistant\n")])
    assert "<|im_start|>user\n<system>\nB\n</system><|im_end|>" in prompt(user, answer, late)
    assert "<|im_start|>system\nA\n\n<system>\nB\n</system><|im_end|>" in prompt(system, late, user)
    broken = server.post("/tokenize", {"messages": [user, late, {"role": "user", "content": 7}]})
    assert (broken.status_code, "messages[2].content" in broken.text) == (400, True)


def test_thinking_that_was_not_shown_comes_back_with_its_signature(
    serve_template: Callable[..., LiveServer],
) -> None:
    server = serve_template(THINKS, rename=("<|endoftext|>", "</think>"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
    shown = server.post(URL, body | {"thinking": {"type": "adaptive", "display": "summarized"}}).json()
    hidden = server.post(URL, body | {"thinking": {"type": "adaptive", "display": "omitted"}}).json()
    for unasked in ({}, {"thinking": {"type": "disabled"}}):
        assert server.post(URL, body | unasked).json()["content"] == [{"type": "text", "text": ""}]
        events, _ = streamed(server, body | unasked | {"stream": True})
        assert [event["type"] for event in events if "index" in event] == [
            "content_block_start",
            "content_block_stop",
        ]
    (visible,), (block,) = shown["content"], hidden["content"]
    assert (block["type"], block["thinking"]) == ("thinking", "")
    assert carried(block["signature"]) == visible["thinking"] != ""
    assert carried(visible["signature"]) == ""
    events, _ = streamed(
        server, body | {"thinking": {"type": "adaptive", "display": "omitted"}, "stream": True}
    )
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [{"type": "signature_delta", "signature": block["signature"]}]

    def count(block: dict[str, Any]) -> int:
        turns = [
            *body["messages"],
            turn_of("assistant", block, text("So.")),
            {"role": "user", "content": "?"},
        ]
        return server.post(COUNT, {"messages": turns}).json()["input_tokens"]

    assert count(block) == count(visible) > count({"type": "redacted_thinking", "data": block["signature"]})


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    """The client, which takes seconds to import: only a process that runs these tests does."""
    return importlib.import_module("anthropic")


@pytest.fixture
def client(roomy: LiveServer, anthropic: ModuleType) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=roomy.url, api_key="unused", max_retries=0) as client:
        yield client


def test_forms_tools_and_models_by_anthropics_client(client: Any, anthropic: ModuleType) -> None:
    hi: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "Hi"}]}
    schema = {
        "type": "object",
        "properties": {"utc": {"type": "boolean"}},
        "required": ["utc"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    greedy = {"extra_body": {"temperature": 0}}
    for messages in (client.messages, client.beta.messages):
        whole = messages.create(**hi, output_config=form, **greedy)
        assert isinstance(json.loads(whole.content[0].text)["utc"], bool)
        with messages.stream(**hi, output_config=form, **greedy) as stream:
            assert stream.get_final_message().content[0].text == whole.content[0].text
    asked: list[bool] = []

    @anthropic.beta_tool(input_schema=schema)
    def now(utc: bool) -> str:
        """Tell the time."""
        asked.append(utc)
        return "noon"

    choice = {"type": "tool", "name": "now"}
    runner = client.beta.messages.tool_runner(
        **hi, tools=[now], tool_choice=choice, max_iterations=3, **greedy
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 3
    assert len(asked) == 3
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    assert client.models.retrieve("tiny") == model
    assert client.get("/api/hello", cast_to=object) == {}


def test_a_client_tries_again_while_a_server_is_overloaded(
    serve_tiny: Callable[..., LiveServer], anthropic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve_tiny()
    engine = type(server.gate.context).engine
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    refusals = itertools.count()

    def loads_twice(context: Any) -> Any:
        if next(refusals) < 2:
            raise importlib.import_module("octavo.errors").NotReadyError("the server is loading")
        return engine.fget(context)

    monkeypatch.setattr(type(server.gate.context), "engine", property(loads_twice))
    refused = server.post(URL, body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (529, "overloaded_error")
    assert refused.headers["retry-after"] == "1"
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=2) as client:
        assert client.messages.create(**body).stop_reason == "max_tokens"
    server.on_events(lambda: server.loop.drain(0.1))
    assert server.post(COUNT, body).status_code == 529
    assert server.http.get("/ready").status_code == 503


def test_a_full_queue_is_a_rate_limit(serve_tiny: Callable[..., LiveServer]) -> None:
    server = serve_tiny({"max_num_seqs": 1}, max_num_queued_reqs=1)
    slow(server)
    body = {"max_tokens": 400, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with server.http.stream("POST", URL, json=body), server.http.stream("POST", URL, json=body):
        eventually(lambda: server.post(URL, body | {"stream": False}).status_code == 429)
        refused = server.post(URL, body)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
    server.assert_drained()


def test_a_client_that_leaves_and_tries_again_leaves_nothing_behind(roomy: LiveServer) -> None:
    body = session(2) | {"max_tokens": 3000}
    for _ in range(3):
        with roomy.http.stream("POST", URL, json=body) as answer:
            assert next(answer.iter_lines()) == "event: message_start"
    roomy.assert_drained()
    assert streamed(roomy, body | {"max_tokens": 2})[0][-2]["delta"]["stop_reason"] == "max_tokens"


def test_random_bodies_of_the_clients_types(live: LiveServer, anthropic: ModuleType) -> None:
    """Fields of any two bodies together; no status of 500 or more, no error that is not Anthropic's."""
    found = importlib.import_module("anthropic.types.beta.message_create_params")
    bodies, chance = samples(found.MessageCreateParamsNonStreaming), random.Random(45)
    for number in range(400):
        body = {**chance.choice(bodies), **chance.choice(bodies), "model": "tiny", "max_tokens": 2}
        body["stream"] = number % 2 == 0
        body["messages"] = chance.choice(bodies)["messages"] + chance.choice(bodies)["messages"]
        answer = live.post(URL if number % 3 else COUNT, body, headers=HEADERS)
        assert answer.status_code < 500, (answer.text, body)
        if answer.status_code != 200:
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["message"]
        assert "event: error" not in answer.text, (answer.text, body)


@pytest.mark.parametrize("status", [503, 529])
def test_a_replica_that_takes_no_requests_sends_a_front_to_another(status: int, tmp_path: Path) -> None:
    """Anthropic's form of the refusal is one, too."""

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, text="{}")

    async def tried(*, final: bool) -> tuple[bool, list[Any]]:
        application, sent = web.Application(), []
        application.router.add_post("/v1/messages", refuse)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        link, fleet = Link(tmp_path / "socket", 5.0), Fleet(["0"])
        fleet.replicas[0].note_report(Report(state="ready", num_running=0, num_waiting=0))
        flight = fleet.send(Marks(), set())
        assert flight is not None

        async def send(message: Any) -> None:
            sent.append(message)

        request = ClientRequest("POST", "/v1/messages", [], b"{}", Marks(), "")
        try:
            return await link.pass_on(request, flight, send, more=[], final=final), sent
        finally:
            flight.end()
            await link.close()
            await runner.cleanup()

    assert asyncio.run(tried(final=False)) == (False, [])
    is_sent, sent = asyncio.run(tried(final=True))
    assert (is_sent, sent[0]["status"]) == (True, status)


def test_a_long_body_is_answered_as_a_short_one(serve_template: Callable[..., LiveServer]) -> None:
    """A process of its own reads it."""
    server = serve_template(THINKS, rename=("<|endoftext|>", "</think>"))
    body = session(2) | {"max_tokens": 3, "temperature": 0, "stream": False, "thread": {"type": "create"}}
    short = server.post(URL, body)
    padded = server.post(URL, body | {"metadata": {"user_id": "x" * (40 << 10)}})
    assert padded.json()["content"] == short.json()["content"]
    assert padded.headers["x-octavo-left-out"] == short.headers["x-octavo-left-out"]
    assert padded.headers["x-octavo-left-out"].endswith("thread, reasoning effort")
    assert carried(padded.json()["content"][0]["signature"]) != ""
