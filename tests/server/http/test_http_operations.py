"""What operators lean on: the log, /load, what may be tried again, which methods a path has."""

import json
import logging
from collections.abc import Callable

import pytest
from http_helpers import LiveServer, chat

from octavo.errors import (
    EngineDeadError,
    InvalidArgumentError,
    NotReadyError,
    OutOfMemoryError,
    QueueFullError,
)
from octavo.server.api_errors import as_api_error
from octavo.server.config import ServerConfig
from octavo.server.startup import JsonFormatter, configure_logging

CHAT = "/v1/chat/completions"
Serve = Callable[..., LiveServer]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/models/tiny", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
        ("DELETE", "/page/app.js", "GET, HEAD"),
        ("POST", "/live", "GET, HEAD"),
        ("POST", "/metrics", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(live: LiveServer, method: str, path: str, allow: str) -> None:
    answer = live.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_load_is_the_number_of_requests(live: LiveServer) -> None:
    assert live.http.get("/load").json() == {"server_load": 0}
    body = chat("Hi", max_tokens=400, ignore_eos=True, stream=True)
    with live.http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert live.http.get("/load").json() == {"server_load": 1}


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (QueueFullError("full", 2.5), 429, {"Retry-After": "3", "retry-after-ms": "2500"}),
        (NotReadyError("loads"), 503, {"Retry-After": "1", "retry-after-ms": "1000"}),
        (OutOfMemoryError("too large"), 500, {"x-should-retry": "false"}),
        (EngineDeadError("gone"), 500, {}),
        (InvalidArgumentError("n must be 1"), 400, {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_be_tried_again_and_when(error: Exception, status: int, headers: dict) -> None:
    """OpenAI's client tries 408, 409, 429 and 5xx again, unless x-should-retry says no."""
    found = as_api_error(error)
    assert (found.status, found.headers) == (status, headers)


def test_probes_are_logged_only_when_they_fail(serve_tiny: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo.server")
    server = serve_tiny(access_log=True)
    for path in ("/health", "/ping", "/ready", "/load", "/metrics", "/version"):
        assert server.http.get(path, headers={"X-Request-Id": "r-7"}).status_code == 200
    server.loop._worker.error = RuntimeError("gone")
    assert server.http.get("/health").status_code == 503
    server.loop._worker.error = None
    found = [record for record in caplog.records if hasattr(record, "octavo_fields")]
    paths = [(record.octavo_fields["path"], record.octavo_fields["status"]) for record in found]
    assert paths == [("/version", 200), ("/health", 503)]
    line = json.loads(JsonFormatter().format(found[0]))
    assert line.pop("time") > 0
    assert 0 < line.pop("seconds") < 10
    assert line.pop("message").startswith("127.0.0.1 GET '/version' 200 ")
    assert line == {
        "level": "INFO",
        "name": "octavo.server",
        "client": "127.0.0.1",
        "method": "GET",
        "path": "/version",
        "status": 200,
        "request_id": "r-7",
    }


def test_a_log_of_json_is_one_line_an_event(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    configure_logging(ServerConfig(log_format="json"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("octavo.test").exception("a\nb %s", "\u2028")
    logging.getLogger("octavo.test").info("below the level")
    (text,) = capsys.readouterr().err.splitlines()
    line = json.loads(text)
    assert (line["level"], line["message"]) == ("ERROR", "a\nb \u2028")
    assert "ValueError: two" in line["exception"]
