"""Answers and conversations that a server was told to keep: what refers to them, what bounds them."""

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
from http_helpers import LiveServer

from octavo.errors import ConfigError
from octavo.server.api.responses.response_store import Kept, Memory, ResponseStore
from octavo.server.api_errors import ApiError
from octavo.server.config import ServerConfig

URL = "/v1/responses"
SHORT: dict[str, Any] = {"model": "tiny", "max_output_tokens": 4, "temperature": 0}


@pytest.fixture
def keeping(serve_tiny: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    server = serve_tiny(response_store_mib=1)
    yield server
    server.assert_drained()


def test_openais_client_goes_on_with_what_is_kept(keeping: LiveServer, openai: ModuleType) -> None:
    with openai.OpenAI(base_url=f"{keeping.url}/v1", api_key="unused", max_retries=0) as client:
        first = client.responses.create(**SHORT, input="One", metadata={"a": "b"})
        assert (first.store, first.previous_response_id) == (True, None)
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        second = client.responses.create(**SHORT, input="Two", previous_response_id=first.id)
        sent = [
            {"role": "user", "content": "One"},
            *(i.to_dict() for i in first.output),
            {"role": "user", "content": "Two"},
        ]
        whole = client.responses.create(**SHORT, input=sent, store=False)
        assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
        assert second.output_text == whole.output_text
        (given,) = client.responses.input_items.list(second.id).data
        assert given.content == "Two"
        referred = client.responses.create(
            **SHORT, input=[sent[0], {"type": "item_reference", "id": first.output[0].id}, sent[-1]]
        )
        assert referred.usage.input_tokens == whole.usage.input_tokens
        told = list(client.responses.create(**SHORT, input="3", previous_response_id=second.id, stream=True))
        assert client.responses.retrieve(told[-1].response.id).output == told[-1].response.output
        for name in (whole.id, "resp-none"):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(name)
        with pytest.raises(openai.BadRequestError, match="has ended"):
            client.responses.cancel(first.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**SHORT, input="Two", previous_response_id=first.id)
        # What was built on it holds its own history.
        assert client.responses.create(**SHORT, input="Four", previous_response_id=second.id).output


def test_conversations(keeping: LiveServer, openai: ModuleType) -> None:
    with openai.OpenAI(base_url=f"{keeping.url}/v1", api_key="unused", max_retries=0) as client:
        one = {"type": "message", "role": "user", "content": "One"}
        talk = client.conversations.create(items=[one], metadata={"a": "b"})
        assert client.conversations.retrieve(talk.id).metadata == {"a": "b"}
        assert client.conversations.update(talk.id, metadata={"c": "d"}).metadata == {"c": "d"}
        first = client.responses.create(**SHORT, conversation=talk.id, input="Two")
        assert first.conversation.id == talk.id
        client.conversations.items.create(talk.id, items=[{**one, "content": "Three"}])
        listed = client.conversations.items.list(talk.id, order="asc").data
        assert [item.role for item in listed] == ["user", "user", "assistant", "user"]
        pages = list(client.conversations.items.list(talk.id, limit=1))
        assert [item.id for item in pages] == [item.id for item in reversed(listed)]
        again = client.responses.create(**SHORT, conversation={"id": talk.id}, input="Four", store=False)
        assert again.usage.input_tokens > first.usage.input_tokens
        client.conversations.items.delete(listed[0].id, conversation_id=talk.id)
        with pytest.raises(openai.NotFoundError):
            client.conversations.items.retrieve(listed[0].id, conversation_id=talk.id)
        assert client.conversations.items.retrieve(listed[1].id, conversation_id=talk.id).id == listed[1].id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(talk.id)
        assert client.conversations.delete(talk.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(talk.id)


def test_a_server_that_keeps_nothing_says_what_would(live: LiveServer) -> None:
    for method, path in (
        ("GET", f"{URL}/a"),
        ("DELETE", f"{URL}/a"),
        ("POST", f"{URL}/a/cancel"),
        ("GET", f"{URL}/a/input_items"),
        ("POST", "/v1/conversations"),
    ):
        answer = live.http.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == 404, path
        assert "--response-store-mib" in answer.json()["error"]["message"]
    for fields in (
        {"previous_response_id": "a"},
        {"conversation": "a"},
        {"input": [{"type": "item_reference", "id": "a"}]},
    ):
        answer = live.post(URL, {"input": "Hi", **fields})
        assert answer.status_code == 400
        assert "--response-store-mib" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"previous_response_id": "a"}, 404),
        ({"previous_response_id": 5}, 400),
        ({"conversation": {"name": "a"}}, 200),
        ({"conversation": ["a"]}, 400),
        ({"conversation": "a", "previous_response_id": "b"}, 400),
        ({"input": [{"type": "item_reference", "id": "a"}]}, 400),
        ({"input": [{"type": "item_reference", "id": ["a"]}]}, 400),
        ({"input": ["a"]}, 400),
        ({"input": 5}, 400),
        ({"store": "x"}, 200),
        ({"background": True}, 400),
    ],
)
def test_what_is_wrong_with_a_reference(keeping: LiveServer, fields: dict[str, Any], status: int) -> None:
    answer = keeping.post(URL, {"input": "Hi", "max_output_tokens": 1, **fields})
    assert answer.status_code == status, answer.text


def test_answers_are_kept_for_each_key_apart(serve_tiny: Callable[..., LiveServer]) -> None:
    server = serve_tiny(response_store_mib=1, api_key="first-key-1,second-key-2")
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("first-key-1", "second-key-2"))
    made = server.http.post(URL, json={"input": "Hi", "max_output_tokens": 1}, headers=mine).json()
    assert server.http.get(f"{URL}/{made['id']}", headers=mine).status_code == 200
    assert server.http.get(f"{URL}/{made['id']}", headers=other).status_code == 404
    asked = {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}], "max_output_tokens": 1}
    assert server.http.post(URL, json=asked, headers=other).status_code == 400
    assert server.http.post(URL, json=asked, headers=mine).status_code == 200


def kept(name: str, text: str = "") -> Kept:
    items = ({"id": f"item-{name}", "text": text},)
    return Kept({"id": name, "object": "response", "output": []}, items, items)


def test_the_store_is_bounded_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(1000, 60.0)
    for number in range(5):
        store.put(None, kept(str(number), "x" * 250))
    assert store.get(None, "4").items[0]["text"] == "x" * 250
    with pytest.raises(ApiError):
        store.get(None, "0")
    store.put(None, kept("huge", "x" * 2000))
    with pytest.raises(ApiError):
        store.get(None, "huge")
    store.put(None, kept("a"))
    store.put(b"k", kept("a", "other"))
    assert store.items(b"k", {"item-a"}) != store.items(None, {"item-a"})
    clock = [1e9]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    store.put(None, kept("late"))
    clock[0] += 61
    with pytest.raises(ApiError):
        store.get(None, "late")


def test_replicas_cannot_keep() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        ServerConfig(response_store_mib=1, replicas=2)


def test_shared_items_count_once_and_as_long_as_an_answer_holds_them() -> None:
    store = ResponseStore(10_000, 60.0)
    for number in range(200):
        long: dict[str, Any] = {"id": f"i-{number}", "text": "x" * 2000}
        short: dict[str, Any] = {"id": f"s-{number}", "text": "y"}
        store.put(None, Kept({"id": f"long-{number}"}, (long,), (long,)))
        # Each goes on with a long one, which it keeps alive.
        store.put(None, Kept({"id": f"short-{number}"}, (short,), (long, short)))
    alive = store.items(None, {f"i-{number}" for number in range(200)})
    assert 3 <= len(alive) <= 5, "the items that answers hold are within the bytes of the store"


@pytest.mark.parametrize("limit", ["0099" + "9" * 5000, "00999999", "9" * 5000, "101"])
def test_a_page_is_never_longer_than_it_may_be(keeping: LiveServer, limit: str) -> None:
    name = keeping.post("/v1/conversations", {}).json()["id"]
    answer = keeping.http.get(f"/v1/conversations/{name}/items?limit={limit}")
    assert answer.status_code == 400
    assert "limit" in answer.json()["error"]["message"]


class _Answer(msgspec.Struct):
    id: str
    output: list[dict[str, Any]]


def test_an_answer_outlives_its_conversation() -> None:
    store = ResponseStore(10_000, 60.0)
    store.put(None, Kept({"id": "conv-1", "object": "conversation"}, (), ()))
    memory = Memory(store, None)
    memory.recall(b'{"input": "Hi", "conversation": "conv-1"}')
    store.remove(None, "conv-1")
    memory.keep(_Answer(id="resp-1", output=[]))
    assert store.get(None, "resp-1").body["id"] == "resp-1"
    with pytest.raises(ApiError, match="nothing is kept"):
        store.get(None, "conv-1")


def test_many_references_are_found_in_one_pass() -> None:
    store = ResponseStore(1 << 26, 60.0)
    items = tuple({"type": "message", "id": f"i-{number}"} for number in range(20_000))
    store.put(b"mine", Kept({"id": "resp-1"}, items, items))
    sent = [{"type": "item_reference", "id": item["id"]} for item in items]
    body = msgspec.json.encode({"input": [*sent, {"type": "item_reference", "id": ["odd"]}]})
    begin = time.process_time()
    recalled = msgspec.json.decode(Memory(store, b"mine").recall(body))["input"]
    # One pass for each reference takes 10 s and more.
    assert time.process_time() - begin < 2.0
    assert recalled[:-1] == list(items)
    hidden = msgspec.json.decode(Memory(store, b"other's").recall(body))["input"]
    assert hidden[:-1] == sent, "another key's items are not found"


def test_a_response_is_no_conversation_and_the_other_way_round(keeping: LiveServer) -> None:
    first = keeping.post(URL, {"input": "Hi", "max_output_tokens": 1}).json()["id"]
    talk = keeping.post("/v1/conversations", {}).json()["id"]
    for field, name in (("conversation", first), ("previous_response_id", talk)):
        answer = keeping.post(URL, {"input": "Hi", "max_output_tokens": 1, field: name})
        assert answer.status_code == 404, answer.text
    assert len(keeping.http.get(f"{URL}/{first}/input_items").json()["data"]) == 1
