"""Answers and conversations that a server was told to keep: what refers to them, what bounds them."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from http_helpers import LiveServer

from octavo.errors import ConfigError
from octavo.server.api.responses.response_store import Kept, ResponseStore
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
    assert store.item(b"k", "item-a") != store.item(None, "item-a")
    clock = [1e9]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    store.put(None, kept("late"))
    clock[0] += 61
    with pytest.raises(ApiError):
        store.get(None, "late")


def test_replicas_cannot_keep() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        ServerConfig(response_store_mib=1, replicas=2)


@pytest.mark.parametrize("limit", ["0", "101", "00011", "0001" + "9" * 5000])
def test_a_limit_out_of_range_is_refused(keeping: LiveServer, openai: ModuleType, limit: str) -> None:
    with openai.OpenAI(base_url=f"{keeping.url}/v1", api_key="unused", max_retries=0) as client:
        talk = client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.conversations.items.list(talk.id, extra_query={"limit": limit})
