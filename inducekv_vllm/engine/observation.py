"""What is measured of one request with memory: its metrics, its span, and the times in its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from .key_cache import KeySource
from .memory_index import MemoryIndex, MemoryLookup
from .metrics import BundleMetrics, Pass
from .spans import RequestSpan

CLIENT_ERRORS = (VLLMClientError, ValueError, TypeError)  # answered with 4xx


class Observation:
    """It is told of each step of a request when the step has ended."""

    def __init__(self, metrics: BundleMetrics, span: RequestSpan) -> None:
        self._metrics = metrics
        self._span = span
        self._pass: Pass = "key"
        self._began = time.perf_counter()
        self._key_seconds = self._retrieval_seconds = 0.0
        self._key_source: KeySource = "computed"
        self._retrieved = self._began

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """For both passes, so that their spans are children of the request's."""
        return self._span.headers

    def keyed(self, source: KeySource) -> None:
        self._key_source, self._key_seconds = source, time.perf_counter() - self._began
        self._metrics.keyed(source, self._key_seconds)

    def looked_up(self, lookup: MemoryLookup) -> None:
        self._retrieved = time.perf_counter()
        self._retrieval_seconds = self._retrieved - self._began - self._key_seconds
        self._metrics.looked_up(lookup, self._retrieval_seconds)
        self._span.looked_up(lookup, self._key_source, self._key_seconds, self._retrieval_seconds)
        self._pass = "answer"

    def finished(self, output: RequestOutput) -> None:
        self._metrics.answered(time.perf_counter() - self._retrieved)
        # The engine's own time: a request that is not streamed has one output, with its last token.
        if isinstance(output.metrics, RequestStateStats):
            self._metrics.first_token(self._retrieved - self._began + output.metrics.first_token_latency)

    def failed(self, error: Exception) -> None:
        if not isinstance(error, CLIENT_ERRORS):
            self._metrics.failed(self._pass)
        self._span.failed(error)

    @property
    def timings(self) -> dict[str, float | str]:
        """For a trace."""
        return {
            "key_pass_ms": 1e3 * self._key_seconds,
            "key_source": self._key_source,
            "retrieval_ms": 1e3 * self._retrieval_seconds,
            "answer_pass_ms": 1e3 * (time.perf_counter() - self._retrieved),
        }


@contextmanager
def observing(
    metrics: BundleMetrics, memory: MemoryIndex, headers: Mapping[str, str] | None, tracing: bool
) -> Iterator[Observation]:
    """Observe one request from its first pass to its end; `headers` are the trace headers that it came with."""
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
