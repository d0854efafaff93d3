"""Prometheus counters, exported by vLLM's `/metrics` route."""

from __future__ import annotations

from prometheus_client import Counter

from .gate import GateDecision

_REQUESTS = Counter(
    "inducekv:requests",
    "Requests to a memory bundle, by its relevance gate: open for a task, closed, or none.",
    ["bundle", "gate", "task"],
)


def count_request(bundle: str, gate_decision: GateDecision | None) -> None:
    """Count one request; `gate_decision` is None for a memory without a gate."""
    if gate_decision is None:
        labels = "none", ""
    elif gate_decision.task is None:
        labels = "closed", ""
    else:
        labels = "open", gate_decision.task
    _REQUESTS.labels(bundle, *labels).inc()
