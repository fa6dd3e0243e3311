"""Random bodies: no status of 500 or more, no answer without a body of ours, no block lost."""

import json
from typing import Any

from http_helpers import LiveServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wild_bodies import PATHS, bodies


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(path=st.sampled_from(PATHS), body=bodies())
def test_random_bodies(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = live.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code < 500, (response.text, body)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in response.text


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(path=st.sampled_from(PATHS), content=st.binary(max_size=200))
def test_random_bytes(live: LiveServer, path: str, content: bytes) -> None:
    response = live.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404)
