"""OpenTelemetry traces: one span for each request that generates, with --otlp-traces-endpoint only.

A span has the names of the gen_ai conventions, and vLLM's for latencies: model, parameters, tokens, finish
reasons, times. It never has a prompt, an answer, a stop string or a key. Nothing of OpenTelemetry is
imported, and nothing is sent, unless the option is given.
"""

from __future__ import annotations

import importlib.util
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.types import Scope

from octavo.errors import ConfigError
from octavo.install_hint import install_extra
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.generation import Generation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

# The name of a span, by route.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
}
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_EXPORT_TIMEOUT_S = 5
_current: ContextVar[Trace | None] = ContextVar("octavo-trace", default=None)


def note_generation(generation: Generation, params: SamplingParams) -> None:
    """Note what a request generates in the trace of the request that this task answers, if it has one."""
    trace = _current.get()
    if trace is not None:
        trace.note(generation, params)


class Traces:
    """Makes spans and sends them to a collector."""

    def __init__(self, endpoint: str, model: str) -> None:
        """Prepare; the first span is sent a few seconds after the first request.

        Args:
            endpoint: the collector's URL for traces.
            model: as clients name it.

        Raises:
            ConfigError: the extra octavo[otel] is not installed.
        """
        if importlib.util.find_spec("opentelemetry") is None:
            raise ConfigError(f"otlp_traces_endpoint needs opentelemetry; run: {install_extra('otel')}")
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        # OpenTelemetry reads further variables: OTEL_TRACES_SAMPLER says which requests have a span.
        name = os.environ.get("OTEL_SERVICE_NAME", "octavo")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(make_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope, path: str) -> Trace | None:
        """Begin the span of a request, under its traceparent if it has one; None if it cannot generate."""
        from opentelemetry.trace import SpanKind

        operation = _OPERATIONS.get(path)
        if operation is None or scope["method"] != "POST":
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "octavo",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "http.request.method": "POST",
                "url.path": path,
            },
        )
        trace = Trace(span)
        _current.set(trace)
        return trace

    def close(self) -> None:
        """Send what is left; wait at most a few seconds for a collector that does not answer."""
        self._provider.shutdown()


class Trace:
    """The span of one request."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._generation: Generation | None = None

    def note(self, generation: Generation, params: SamplingParams) -> None:
        """Note what the request asks for, and where its outputs will be."""
        self._generation = generation
        values = {name: getattr(params, name) for name in _PARAMETERS}
        for name, value in {**values, "choice.count": params.n}.items():
            if value is not None:
                self._span.set_attribute(f"gen_ai.request.{name}", value)

    def end(self, status: int, request_id: str) -> None:
        """End the span.

        Args:
            status: the answer's status; 499 if the client left.
            request_id: the one that the client got.
        """
        from opentelemetry.trace import StatusCode

        _current.set(None)
        self._span.set_attributes({"gen_ai.request.id": request_id, "http.response.status_code": status})
        reasons: list[str] = []
        if self._generation is not None and self._generation.streams:
            reasons = self._describe([stream.output for stream in self._generation.streams])
        if status >= 400 or "error" in reasons:
            self._span.set_attribute("error.type", str(status) if status >= 400 else "error")
        if status >= 500 or "error" in reasons:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _describe(self, outputs: list[RequestOutput]) -> list[str]:
        """Write the outcome into the span; return the finish reasons."""
        completions = [completion for output in outputs for completion in output.outputs]
        # Without a reason, the engine died before it could give one.
        reasons = [completion.finish_reason or "error" for completion in completions]
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
                "gen_ai.usage.cache_read.input_tokens": sum(output.num_cached_tokens for output in outputs),
                "gen_ai.usage.output_tokens": sum(len(completion.token_ids) for completion in completions),
                "gen_ai.response.finish_reasons": reasons,
            }
        )
        first = outputs[0].metrics
        for name, seconds in (
            ("time_to_first_token", first.time_to_first_token_s),
            ("time_in_queue", first.queue_s),
            ("e2e", first.e2e_latency_s),
        ):
            if seconds is not None:
                self._span.set_attribute(f"gen_ai.latency.{name}", seconds)
        return reasons


def make_exporter(endpoint: str) -> SpanExporter:
    """Return what sends spans, by OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
