"""What is measured of one request with memory: its metrics, its span, and the times in its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from ..protocol import Decision, Untouched
from .metrics import BundleMetrics
from .served_bundle import ServedBundle
from .spans import RequestSpan

CLIENT_ERRORS = (VLLMClientError, ValueError, TypeError)  # answered with 4xx


class Observation:
    """It is told of each step of a request when the step has ended."""

    def __init__(self, metrics: BundleMetrics, span: RequestSpan) -> None:
        self._metrics = metrics
        self._span = span
        self._began = time.perf_counter()
        self._decision: Decision | None = None

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """For the engine, so that its span is a child of the request's."""
        return self._span.headers

    def decided(self, decision: Decision) -> None:
        self._decision = decision
        self._metrics.decided(decision)
        self._span.decided(decision)

    def finished(self, output: RequestOutput) -> None:
        self._metrics.answered(time.perf_counter() - self._began)
        # The engine's own time: a request that is not streamed has one output, with its last token.
        if isinstance(output.metrics, RequestStateStats):
            self._metrics.first_token(output.metrics.first_token_latency)

    def failed(self, error: Exception) -> None:
        if not isinstance(error, CLIENT_ERRORS):
            self._metrics.failed()
        self._span.failed(error)

    @property
    def timings(self) -> dict[str, float | str]:
        """For a trace."""
        decision = self._decision or Decision(Untouched())
        return {
            "decision_source": decision.source,
            "decision_ms": 1e3 * decision.seconds,
            "request_ms": 1e3 * (time.perf_counter() - self._began),
        }


@contextmanager
def observing(
    metrics: BundleMetrics, memory: ServedBundle, headers: Mapping[str, str] | None, tracing: bool
) -> Iterator[Observation]:
    """Observe one request from its beginning to its end; `headers` are the trace headers that it came with."""
    span = RequestSpan(tracing, headers, metrics.bundle, memory)
    observed = Observation(metrics, span)
    with metrics.active():
        try:
            yield observed
        except Exception as error:
            observed.failed(error)
            raise
        finally:
            span.end()
