"""Spans of requests with memory, for OpenTelemetry.

vLLM makes one span `llm_request` for each request of the engine when it has ended, from a fixed list of attributes; it
offers no place to add any. So a request with memory gets a span of its own, `inducekv_request`, and vLLM's is its
child: vLLM takes the parent of a span from the request's trace headers.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Span, SpanKind, get_tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

from ..protocol import Decision
from .memory import Memory

SPAN = "inducekv_request"


class RequestSpan:
    """The span of one request with memory. Without tracing it does nothing."""

    def __init__(self, enabled: bool, headers: Mapping[str, str] | None, bundle: str, memory: Memory) -> None:
        """`headers` are the trace headers of the HTTP request."""
        self.headers: Mapping[str, str] | None = headers  # for the engine
        self._span: Span | None = None
        if enabled:
            self._span = _start(headers, {"inducekv.bundle": bundle, "inducekv.digest": memory.digest})
            self.headers = _headers_of(self._span)

    def decided(self, decision: Decision) -> None:
        """Add what the request is answered with."""
        if self._span is None:
            return
        attributes: dict[str, str | int | float] = {
            "inducekv.decision.source": decision.source,
            "inducekv.decision.seconds": decision.seconds,
            "inducekv.gate": decision.verdict,
        }
        if decision.margins is not None:
            attributes["inducekv.gate.margin"] = max(decision.margins)
        if decision.task is not None:
            attributes["inducekv.task"] = decision.task
        if decision.entries:
            attributes["inducekv.entries"] = len(decision.entries)
        if decision.facts is not None:
            attributes["inducekv.facts"] = len(decision.facts.facts)
        if decision.similarity is not None:
            attributes["inducekv.similarity"] = decision.similarity
        self._span.set_attributes(attributes)

    def failed(self, error: Exception) -> None:
        if self._span is not None:
            self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500])

    def end(self) -> None:
        if self._span is not None:
            self._span.end()


def _start(headers: Mapping[str, str] | None, attributes: Mapping[str, str]) -> Span:
    context = TraceContextTextMapPropagator().extract(headers) if headers else None
    tracer = get_tracer("inducekv")
    return tracer.start_span(SPAN, context=context, kind=SpanKind.INTERNAL, attributes=dict(attributes))


def _headers_of(span: Span) -> dict[str, str]:
    """The trace headers of what happens within a span."""
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, context=set_span_in_context(span))
    return headers
