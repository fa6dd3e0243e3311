"""OpenTelemetry spans, as an exporter in memory gets them; without the option nothing of it is imported."""

import ast
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_helpers import LiveServer, chat, eventually, free_port
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import octavo
from octavo.errors import ConfigError
from octavo.server import tracing
from octavo.server.config import ServerConfig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Serve = Callable[..., LiveServer]
ENDPOINT = "http://127.0.0.1:9/v1/traces"


@pytest.fixture
def traced(serve_tiny: Serve, monkeypatch: pytest.MonkeyPatch) -> tuple[LiveServer, Callable[[], list[Any]]]:
    """A server with traces, and a function that returns the spans that have come since."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "make_exporter", lambda endpoint: exporter)
    server = serve_tiny(otlp_traces_endpoint=ENDPOINT)

    def spans() -> list[ReadableSpan]:
        eventually(lambda: server.gate.num_open == 0)
        traces = server.gate.context.traces
        assert traces is not None
        traces._provider.force_flush()
        found = list(exporter.get_finished_spans())
        exporter.clear()
        return found

    return server, spans


def test_a_span_says_what_a_request_was_but_not_what_it_said(traced: tuple) -> None:
    server, spans = traced
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Request-Id": "r-1"}
    asked = chat("my-secret-prompt", max_tokens=6, ignore_eos=True, top_p=0.5, stop=["my-secret-stop"])
    usage = server.post(CHAT, asked, headers=parent).json()["usage"]
    events = server.events(TEXT, {"prompt": [[60, 61], [62]], "n": 2, "max_tokens": 3, "ignore_eos": True})
    assert events
    answered, streamed = spans()
    assert (answered.name, answered.kind) == ("chat tiny", SpanKind.SERVER)
    assert format(answered.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert format(answered.parent.span_id, "016x") == "b7ad6b7169203331"
    found = dict(answered.attributes)
    assert found.pop("gen_ai.latency.time_in_queue") >= 0
    assert 0 < found.pop("gen_ai.latency.time_to_first_token") < found.pop("gen_ai.latency.e2e") < 30
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.id": "r-1",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": CHAT,
    }
    assert streamed.parent is None
    assert streamed.attributes["gen_ai.operation.name"] == "text_completion"
    assert streamed.attributes["gen_ai.usage.input_tokens"] == 3
    assert streamed.attributes["gen_ai.usage.output_tokens"] == 12
    assert streamed.attributes["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert "my-secret" not in answered.to_json()


def test_spans_of_requests_that_fail(traced: tuple) -> None:
    server, spans = traced
    assert server.post(CHAT, chat("Hi", temprature=1)).status_code == 400
    assert server.http.get("/metrics").status_code == 200
    assert server.http.get(CHAT).status_code == 405
    (refused,) = spans()
    assert refused.attributes["error.type"] == "400"
    assert "gen_ai.usage.input_tokens" not in refused.attributes
    assert refused.status.status_code == StatusCode.UNSET

    def broken(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("my-secret")

    server.loop.submit = broken
    assert server.post(CHAT, chat("Hi")).status_code == 500
    (failed,) = spans()
    assert (failed.attributes["error.type"], failed.status.status_code) == ("500", StatusCode.ERROR)
    assert "my-secret" not in failed.to_json()


def test_spans_go_to_the_collector_and_nothing_else_goes_out(
    serve_tiny: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that is not there harms nobody but itself."""
    port = free_port()
    opened: list[object] = []
    connect = socket.socket.connect

    def noted(self: socket.socket, address: Any) -> None:
        opened.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noted)
    monkeypatch.setattr(tracing, "_EXPORT_TIMEOUT_S", 0.2)
    server = serve_tiny(otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces")
    assert server.post(CHAT, chat("Hi")).status_code == 200
    server.gate.context.traces._provider.force_flush()  # type: ignore[union-attr]
    assert server.post(CHAT, chat("Hi")).status_code == 200
    assert set(opened) == {("127.0.0.1", server.config.port), ("127.0.0.1", port)}


def test_nothing_is_imported_without_the_option() -> None:
    for path in Path(octavo.__path__[0]).rglob("*.py"):
        # At a module's top, that is: in functions, only Traces and Trace import it.
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not any(name.startswith("opentelemetry") for name in names), path


def test_what_the_option_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        ServerConfig(otlp_traces_endpoint="collector:4317")
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run: .* -m pip install .*\[otel\]"):
        tracing.Traces(ENDPOINT, "tiny")
