"""Spans of requests with memory, for OpenTelemetry.

vLLM makes one span `llm_request` for each request of the engine when it has ended, from a fixed list of attributes; it
offers no place to add any. So a request with memory gets a span of its own, `inducekv_request`, and the spans of its
two passes are the children of that one: vLLM takes the parent of a span from the request's trace headers.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Span, SpanKind, get_tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

from .memory_index import MemoryIndex, MemoryLookup

SPAN = "inducekv_request"


class RequestSpan:
    """The span of one request with memory. Without tracing it does nothing."""

    def __init__(self, enabled: bool, headers: Mapping[str, str] | None, bundle: str, memory: MemoryIndex) -> None:
        """`headers` are the trace headers of the HTTP request."""
        self.headers: Mapping[str, str] | None = headers  # for the passes
        self._span: Span | None = None
        if enabled:
            self._span = _start(headers, {"inducekv.bundle": bundle, "inducekv.digest": memory.digest})
            self.headers = _headers_of(self._span)

    def looked_up(self, lookup: MemoryLookup, key_source: str, key_seconds: float, retrieval_seconds: float) -> None:
        """Add what the key pass and the search have found."""
        if self._span is None:
            return
        facts: dict[str, str | int | float] = {
            "inducekv.key.source": key_source,
            "inducekv.key.seconds": key_seconds,
            "inducekv.retrieval.seconds": retrieval_seconds,
            "inducekv.gate": "none",
        }
        if (decision := lookup.gate_decision) is not None:
            facts["inducekv.gate"] = decision.closed or "open"
            facts["inducekv.gate.margin"] = float(decision.margins.max())
            if decision.task is not None:
                facts["inducekv.task"] = decision.task
        if (retrieval := lookup.retrieval) is not None:
            facts["inducekv.entries"] = len(retrieval.entries)
            if retrieval.similarity is not None:
                facts["inducekv.similarity"] = retrieval.similarity
        self._span.set_attributes(facts)

    def failed(self, error: Exception) -> None:
        if self._span is not None:
            self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500])

    def end(self) -> None:
        if self._span is not None:
            self._span.end()


def _start(headers: Mapping[str, str] | None, facts: Mapping[str, str]) -> Span:
    context = TraceContextTextMapPropagator().extract(headers) if headers else None
    tracer = get_tracer("inducekv")
    return tracer.start_span(SPAN, context=context, kind=SpanKind.INTERNAL, attributes=dict(facts))


def _headers_of(span: Span) -> dict[str, str]:
    """The trace headers of what happens within a span."""
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, context=set_span_in_context(span))
    return headers
