"""Counters for Prometheus, in the registry that vLLM's `/metrics` shows."""

from __future__ import annotations

from prometheus_client import Counter

from .gate import Relevance

_REQUESTS = Counter(
    "inducekv:requests",
    "Requests to a memory bundle, by its relevance gate: open for a task, closed, or none.",
    ["bundle", "gate", "task"],
)


def count_request(bundle: str, relevance: Relevance | None) -> None:
    """One more request that the gate has decided on; `relevance` None for a memory without one."""
    if relevance is None:
        labels = "none", ""
    elif relevance.task is None:
        labels = "closed", ""
    else:
        labels = "open", relevance.task
    _REQUESTS.labels(bundle, *labels).inc()
