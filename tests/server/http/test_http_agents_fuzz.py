"""Agents' bodies with anything in any place, and routes of what is kept: no status of 500 or more."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import TINY
from http_helpers import LiveServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_http_agents import AGENT, ASK, HISTORY
from tiny_chat import write_model
from wild_bodies import texts, values

from octavo import EngineConfig
from octavo.engine.engine import Engine

BODY: dict[str, Any] = {**AGENT, "input": [*HISTORY, *ASK["input"]], "max_output_tokens": 2, "stream": False}
ITEMS = {"items": HISTORY, "metadata": {"a": "b"}}
CHECKS = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


@pytest.fixture(scope="module")
def keeping_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_model(tmp_path_factory.mktemp("keeping-chat"), max_model_len=4096)
    config = EngineConfig.from_dict({"model": str(folder), **TINY, "num_blocks": 2048})
    server = LiveServer(lambda: Engine(config), "tiny", response_store_mib=1, sse_keep_alive_s=0)
    yield server.wait_until_ready()
    server.close()


@pytest.fixture
def keeping(keeping_server: LiveServer) -> Iterator[LiveServer]:
    yield keeping_server
    keeping_server.assert_drained()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


@st.composite
def mutated(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """A body in which some values are others, or gone, or have a field more."""
    body = copy.deepcopy(body)
    for path in draw(st.lists(st.sampled_from(list(places(body))), min_size=1, max_size=3)):
        try:
            *outer, last = path
            holder = body
            for key in outer:
                holder = holder[key]
            if draw(st.integers(0, 3)) == 0:
                del holder[last]
            elif isinstance(holder[last], dict) and draw(st.booleans()):
                holder[last][draw(texts)] = draw(values)
            else:
                holder[last] = draw(values)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    return body


@settings(max_examples=250, deadline=None, suppress_health_check=CHECKS, database=None)
@given(body=mutated(BODY), streams=st.booleans())
def test_agents_bodies(keeping: LiveServer, body: dict[str, Any], streams: bool) -> None:
    body = {**body, "stream": True} if streams else body
    answer = keeping.http.post("/v1/responses", content=json.dumps(body), headers=JSON)
    assert answer.status_code < 500, (answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


JSON = {"content-type": "application/json"}
names = st.sampled_from(["conv", "resp-x", "%00", "..", "é", "a" * 300])
ROUTES = ("/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/responses/{}/cancel", "/v1/conversations")
ROUTES += ("/v1/conversations/{}", "/v1/conversations/{}/items", "/v1/conversations/{}/items/x")
queries = st.sampled_from(
    ["", "?limit=0", "?limit=1&order=asc", "?order=up", "?after=x", "?stream=true", "?limit=²"]
)


@settings(max_examples=200, deadline=None, suppress_health_check=CHECKS, database=None)
@given(
    method=st.sampled_from(["GET", "POST", "DELETE"]),
    route=st.sampled_from(ROUTES),
    name=names,
    query=queries,
    body=st.one_of(mutated(ITEMS), values),
)
def test_routes_of_what_is_kept(
    keeping: LiveServer, method: str, route: str, name: str, query: str, body: object
) -> None:
    if name == "conv":
        made = keeping.http.post("/v1/conversations", json=ITEMS).json()
        name = made["id"]
        keeping.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1, "conversation": name})
    content = json.dumps(body).encode() if method == "POST" else None
    answer = keeping.http.request(method, route.format(name) + query, content=content, headers=JSON)
    assert answer.status_code < 500, (answer.text, method, route, body)
