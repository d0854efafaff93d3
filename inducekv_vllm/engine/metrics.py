"""Metrics of the requests to memory bundles, for Prometheus; vLLM's route `/metrics` exports them.

Every name begins with `inducekv:`. Series with the label `bundle` begin when a bundle of that name is loaded and end
when it is unloaded. `server/metrics.py` has those of the bundles themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, get_args

from prometheus_client import Counter, Gauge, Histogram

from ..gate import Closed
from .key_cache import KeySource
from .memory_index import MemoryIndex, MemoryLookup

KEY_SOURCES: Final[tuple[KeySource, ...]] = get_args(KeySource)
Pass = Literal["key", "answer"]
PASSES: Final[tuple[Pass, ...]] = ("key", "answer")

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
QUERY_KEYS = Counter(
    "inducekv:query_keys",
    "Query keys by source: computed in a key pass, shared with a request that ran at the same time, cached, or none.",
    ["bundle", "source"],
)
FAILURES = Counter(
    "inducekv:request_failures",
    "Requests to a memory bundle that an error has ended, by the pass that it came from.",
    ["bundle", "pass"],
)
ACTIVE = Gauge(
    "inducekv:active_requests",
    "Requests that run with a memory bundle, on any of its versions.",
    ["bundle"],
    multiprocess_mode="livesum",
)
KEY_PASS_SECONDS = Histogram(
    "inducekv:key_pass_seconds", "Seconds of a key pass that was computed.", ["bundle"], buckets=TO_FIRST_TOKEN
)
RETRIEVAL_SECONDS = Histogram(
    "inducekv:retrieval_seconds", "Seconds of the gate and the search for entries.", ["bundle"], buckets=RETRIEVAL
)
FIRST_TOKEN_SECONDS = Histogram(
    "inducekv:time_to_first_token_seconds",
    "Seconds to the first token of a request with memory, its key pass included.",
    ["bundle"],
    buckets=TO_FIRST_TOKEN,
)
ANSWER_PASS_SECONDS = Histogram(
    "inducekv:answer_pass_seconds", "Seconds of the answer pass, to the last token.", ["bundle"], buckets=WHOLE_ANSWER
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
OF_A_BUNDLE: Final[tuple[Counter | Gauge | Histogram, ...]] = (
    *(REQUESTS, QUERY_KEYS, FAILURES, ACTIVE),
    *(KEY_PASS_SECONDS, RETRIEVAL_SECONDS, FIRST_TOKEN_SECONDS, ANSWER_PASS_SECONDS, SIMILARITY, GATE_MARGIN),
)


def several_processes() -> bool:
    """Whether processes share their metrics in a folder. prometheus_client cannot end a series there."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


def end_series(metric: Counter | Gauge | Histogram, bundle: str) -> None:
    """Export the series of a bundle no longer, if that can be done."""
    if not several_processes():
        metric.remove_by_labels({"bundle": bundle})


class BundleMetrics:
    """The series of one name. A request holds on to it, so that it does not begin series that have ended."""

    def __init__(self, bundle: str, *, exported: bool = True) -> None:
        self.bundle = bundle
        self._exported = exported

    def begin(self, memory: MemoryIndex) -> None:
        """Begin the series at 0, those of the gate's tasks included: a rate needs what was before the first request."""
        tasks = memory.gate.tasks if memory.gate is not None else ()
        verdicts = [*(("open", task) for task in tasks), *((reason, "") for reason in CLOSED)] or [("none", "")]
        for verdict in verdicts:
            REQUESTS.labels(self.bundle, *verdict)
        for source in KEY_SOURCES:
            QUERY_KEYS.labels(self.bundle, source)
        for of_pass in PASSES:
            FAILURES.labels(self.bundle, of_pass)
        for metric in OF_A_BUNDLE[3:]:
            metric.labels(self.bundle)

    def end(self) -> None:
        self._exported = False
        for metric in OF_A_BUNDLE:
            end_series(metric, self.bundle)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count a request as running."""
        if not self._exported:
            yield
            return
        running = ACTIVE.labels(self.bundle)  # this one: another of the same name may follow it
        running.inc()
        try:
            yield
        finally:
            running.dec()

    def keyed(self, source: KeySource, seconds: float) -> None:
        """Record a query key and how long the request waited for it."""
        if not self._exported:
            return
        QUERY_KEYS.labels(self.bundle, source).inc()
        if source == "computed":
            KEY_PASS_SECONDS.labels(self.bundle).observe(seconds)

    def looked_up(self, lookup: MemoryLookup, seconds: float) -> None:
        """Record what the gate and the search have found."""
        if not self._exported:
            return
        RETRIEVAL_SECONDS.labels(self.bundle).observe(seconds)
        REQUESTS.labels(self.bundle, *_verdict(lookup)).inc()
        if lookup.gate_decision is not None:
            GATE_MARGIN.labels(self.bundle).observe(float(lookup.gate_decision.margins.max()))
        if lookup.retrieval is not None and lookup.retrieval.similarity is not None:
            SIMILARITY.labels(self.bundle).observe(lookup.retrieval.similarity)

    def first_token(self, seconds: float) -> None:
        if self._exported:
            FIRST_TOKEN_SECONDS.labels(self.bundle).observe(seconds)

    def answered(self, seconds: float) -> None:
        if self._exported:
            ANSWER_PASS_SECONDS.labels(self.bundle).observe(seconds)

    def failed(self, of_pass: Pass) -> None:
        if self._exported:
            FAILURES.labels(self.bundle, of_pass).inc()


def _verdict(lookup: MemoryLookup) -> tuple[str, str]:
    """The labels `gate` and `task`."""
    decision = lookup.gate_decision
    if decision is None:
        return "none", ""
    return decision.closed or "open", decision.task or ""
