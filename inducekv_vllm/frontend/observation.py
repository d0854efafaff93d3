"""What is measured of requests with memory: metrics for Prometheus, and the times in a trace.

vLLM's route `/metrics` exports the metrics. Every name begins with `inducekv:`. Series with the label `bundle` begin
when a bundle of that name is loaded and end when it is unloaded. `server/metrics.py` has those of the bundles
themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, get_args

from prometheus_client import Counter, Gauge, Histogram
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from ..gate import Closed
from ..protocol import Decided, Decision, Source, Untouched
from .served_bundle import ServedBundle

CLIENT_ERRORS: Final = (VLLMClientError, ValueError, TypeError)  # answered with 4xx
OTHER: Final = "(other)"  # the label of names without series of their own; no bundle may have this name
SOURCES: Final[tuple[Source, ...]] = get_args(Source)

# Of vLLM's own histograms of latencies, so that a dashboard can draw both with one scale.
TO_FIRST_TOKEN: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
WHOLE_ANSWER: Final = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0),
)
RETRIEVAL: Final = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
COSINES: Final = (-0.5, 0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99)
MARGINS: Final = (
    *(-20.0, -15.0, -10.0, -7.0, -5.0, -4.0, -3.0, -2.0, -1.0, -0.5, 0.0),
    *(0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0),
)  # log-odds
CLOSED: Final[tuple[Closed, ...]] = get_args(Closed)

REQUESTS = Counter(
    "inducekv:requests",
    "Requests to a memory bundle, by its relevance gate: open for a task, closed (outside, below_threshold), or none.",
    ["bundle", "gate", "task"],
)
DECISIONS = Counter(
    "inducekv:decisions",
    "Decisions by source: computed from the prompt, or none was needed.",
    ["bundle", "source"],
)
FAILURES = Counter("inducekv:request_failures", "Requests to a memory bundle that an error has ended.", ["bundle"])
ACTIVE = Gauge(
    "inducekv:active_requests",
    "Requests that run with a memory bundle, on any of its versions.",
    ["bundle"],
    multiprocess_mode="livesum",
)
DECISION_SECONDS = Histogram(
    "inducekv:decision_seconds", "Seconds of the gate and the search for entries.", ["bundle"], buckets=RETRIEVAL
)
FIRST_TOKEN_SECONDS = Histogram(
    "inducekv:time_to_first_token_seconds",
    "Seconds to the first token of a request with memory.",
    ["bundle"],
    buckets=TO_FIRST_TOKEN,
)
REQUEST_SECONDS = Histogram(
    "inducekv:request_seconds", "Seconds of a request with memory.", ["bundle"], buckets=WHOLE_ANSWER
)
SIMILARITY = Histogram(
    "inducekv:similarity",
    "Cosine of a query key and the retrieval key closest to it, where entries were retrieved.",
    ["bundle"],
    buckets=COSINES,
)
GATE_MARGIN = Histogram(
    "inducekv:gate_margin",
    "Largest margin of the relevance gate; the gate is open from 0 on.",
    ["bundle"],
    buckets=MARGINS,
)
FACTS = Counter("inducekv:fact_requests", "Requests that a fact of the bundle was found for.", ["bundle"])
BY_BUNDLE_ALONE: Final[tuple[Counter | Gauge | Histogram, ...]] = (
    *(FAILURES, ACTIVE, FACTS),
    *(DECISION_SECONDS, FIRST_TOKEN_SECONDS, REQUEST_SECONDS, SIMILARITY, GATE_MARGIN),
)
OF_A_BUNDLE: Final = (REQUESTS, DECISIONS, *BY_BUNDLE_ALONE)


@contextmanager
def observing(metrics: Sequence[BundleMetrics]) -> Iterator[Observation]:
    """Observe one request from its beginning to its end; `metrics` of each of its memories."""
    with ExitStack() as stack:
        for each in metrics:
            stack.enter_context(each.active())
        try:
            yield Observation(metrics)
        except Exception as error:
            if not isinstance(error, CLIENT_ERRORS):
                for each in metrics:
                    each.failed()
            raise


class Observation:
    """It is told of each step of a request when the step has ended."""

    def __init__(self, metrics: Sequence[BundleMetrics]) -> None:
        """`metrics` of each memory."""
        self._metrics = metrics
        self._began = time.perf_counter()
        self._decided = Decided((Decision(Untouched()),))

    def decided(self, decided: Decided) -> None:
        self._decided = decided
        for metrics, decision in zip(self._metrics, decided.each, strict=True):
            metrics.decided(decision)

    def finished(self, output: RequestOutput) -> None:
        # The engine's own times, from the request's arrival: its pictures were read before it begins here. A request
        # that is not streamed has one output, with its last token.
        stats = output.metrics if isinstance(output.metrics, RequestStateStats) else None
        seconds = time.perf_counter() - self._began if stats is None else time.time() - stats.arrival_time
        for metrics in self._metrics:
            metrics.answered(seconds)
            if stats is not None:
                metrics.first_token(stats.first_token_latency)

    @property
    def timings(self) -> dict[str, float | str]:
        return {
            "decision_source": self._decided.each[0].source,
            "decision_ms": 1e3 * sum(decision.seconds for decision in self._decided.each),
            "request_ms": 1e3 * (time.perf_counter() - self._began),
        }


def several_processes() -> bool:
    """Whether processes share their metrics in a folder. prometheus_client cannot end a series there."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


def end_series(metric: Counter | Gauge | Histogram, bundle: str) -> None:
    """Export the series of a bundle no longer, if that can be done."""
    if not several_processes():
        metric.remove_by_labels({"bundle": bundle})


class BundleMetrics:
    """The series of one name. A request holds on to it, so that it does not begin series that have ended."""

    def __init__(self, bundle: str, *, exported: bool = True, label: str | None = None) -> None:
        """`label`: `OTHER` for a name that shares its series with others."""
        self.bundle = bundle
        self._label = label or bundle
        self._exported = exported

    def begin(self, memory: ServedBundle) -> None:
        """Begin the series at 0, those of the gate's tasks included: a rate needs what was before the first request."""
        tasks = memory.metadata.gate_tasks
        verdicts = [*(("open", task) for task in tasks), *((reason, "") for reason in CLOSED)] or [("none", "")]
        for verdict in verdicts:
            REQUESTS.labels(self._label, *verdict)
        for source in SOURCES:
            DECISIONS.labels(self._label, source)
        for metric in BY_BUNDLE_ALONE:
            metric.labels(self._label)

    def end(self) -> None:
        self._exported = False
        for metric in OF_A_BUNDLE:
            end_series(metric, self._label)

    @contextmanager
    def active(self) -> Iterator[None]:
        if not self._exported:
            yield
            return
        running = ACTIVE.labels(self._label)  # this one: another of the same name may follow it
        running.inc()
        try:
            yield
        finally:
            running.dec()

    def decided(self, decision: Decision) -> None:
        if not self._exported:
            return
        DECISIONS.labels(self._label, decision.source).inc()
        task = "" if self._label == OTHER else decision.task or ""
        REQUESTS.labels(self._label, decision.verdict, task).inc()
        if decision.source == "computed":
            DECISION_SECONDS.labels(self._label).observe(decision.seconds)
        if decision.margins is not None:
            GATE_MARGIN.labels(self._label).observe(max(decision.margins))
        if decision.answer is not None:
            FACTS.labels(self._label).inc()
        if decision.similarity is not None:
            SIMILARITY.labels(self._label).observe(decision.similarity)

    def first_token(self, seconds: float) -> None:
        if self._exported:
            FIRST_TOKEN_SECONDS.labels(self._label).observe(seconds)

    def answered(self, seconds: float) -> None:
        if self._exported:
            REQUEST_SECONDS.labels(self._label).observe(seconds)

    def failed(self) -> None:
        if self._exported:
            FAILURES.labels(self._label).inc()
