"""Who is let in by headers alone: repeated ones, pages of other origins; and the names that answers have."""

from collections.abc import Callable

import pytest
from http_helpers import LiveServer, chat, raw

CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
KEY = "sk-0123456789abcdef"
Serve = Callable[..., LiveServer]
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
FOREIGN = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "nonsense"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
    {"Origin": "https://evil.example"},
    {"Origin": "http://localhost:1"},
    {"Origin": "null"},
)


@pytest.mark.parametrize(
    "lines",
    [
        "Host: localhost\r\nHost: localhost",
        "Host: localhost\r\nHost: evil.example",
        "Host: evil.example\r\nHost: localhost",
        "host: localhost\r\nHOST: localhost",
        "Host: localhost\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b",
        "Host: localhost\r\nX-Api-Key: a\r\nX-Api-Key: b",
        "Host: localhost\r\nSec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site",
    ],
)
def test_a_header_that_may_come_once_is_refused_twice(live: LiveServer, lines: str) -> None:
    for path in ("/health", "/v1/models", "/live", "/"):
        answer = raw(live, f"GET {path} HTTP/1.1\r\n{lines}\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400"), answer
        assert b'"code":"repeated_header"' in answer


def test_headers_that_may_be_repeated_are_taken(live: LiveServer) -> None:
    lines = "Host: localhost\r\nAccept: a/b\r\nAccept: c/d\r\nCookie: a=b\r\nCookie: c=d\r\nConnection: close"
    assert raw(live, f"GET /v1/models HTTP/1.1\r\n{lines}\r\n\r\n".encode()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_pages_of_other_origins_are_refused_what_is_for_ours(live: LiveServer, headers: dict) -> None:
    assert live.http.get("/live", headers=headers).status_code == 403
    for path, body in ((CHAT, chat("Hi")), (MESSAGES, HELLO), ("/tokenize", {"prompt": "a"})):
        answer = live.post(path, body, headers=headers)
        assert (answer.status_code, "foreign_page" in answer.text or path == MESSAGES) == (403, True)
    # A link to the page, probes, and what says nothing of others.
    for path in ("/", "/health", "/ready", "/page/app.js"):
        assert live.http.get(path, headers=headers).status_code == 200


def test_our_own_page_and_programs_are_let_in(live: LiveServer) -> None:
    host = f"127.0.0.1:{live.config.port}"
    for headers in (
        {},
        {"Sec-Fetch-Site": "same-origin", "Origin": live.url},
        {"Sec-Fetch-Site": "none"},
        # A proxy may write another Host.
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.example"},
        {"Origin": f"http://{host}"},
    ):
        with live.http.stream("GET", "/live", headers=headers) as answer:
            assert answer.status_code == 200
        assert live.post(CHAT, chat("Hi"), headers=headers).status_code == 200


def test_pages_that_are_named_or_have_a_key_are_let_in(serve_tiny: Serve) -> None:
    page = {"Sec-Fetch-Site": "cross-site", "Origin": "https://app.example:8443"}
    named = serve_tiny(allowed_hosts=("app.example",))
    assert named.post(CHAT, chat("Hi"), headers=page).status_code == 200
    assert (
        named.post(CHAT, chat("Hi"), headers={**page, "Origin": "https://app.example.evil"}).status_code
        == 403
    )
    keyed = serve_tiny(api_key=KEY)
    assert keyed.post(CHAT, chat("Hi"), headers=page).status_code == 401
    given = {**page, "Authorization": f"Bearer {KEY}"}
    assert keyed.post(CHAT, chat("Hi"), headers=given).status_code == 200
    assert keyed.http.get("/live", headers=given).status_code == 403


def test_every_answer_of_anthropics_routes_has_the_header_request_id(serve_tiny: Serve) -> None:
    server = serve_tiny(api_key=KEY)
    key = {"x-api-key": KEY}
    for path, body, headers, status in (
        (MESSAGES, HELLO, key, 200),
        (MESSAGES, {**HELLO, "stream": True}, key, 200),
        (COUNT, {"messages": HELLO["messages"]}, key, 200),
        (MESSAGES, {"max_tokens": 2}, key, 400),
        (MESSAGES, HELLO, {}, 401),
        (COUNT, {}, key, 400),
        ("/v1/messages/nothing", {}, key, 404),
    ):
        answer = server.post(path, body, headers={**headers, "X-Request-Id": "mine"})
        assert answer.status_code == status, answer.text
        assert (answer.headers["request-id"], answer.headers["x-request-id"]) == ("mine", "mine")
        assert status == 200 or answer.json()["type"] == "error"
    other = server.post(CHAT, chat("Hi"), headers=key)
    assert "request-id" not in other.headers
    assert len(other.headers["x-request-id"]) == 32
