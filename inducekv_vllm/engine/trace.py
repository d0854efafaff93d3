"""Traces: which entries and weights a request was answered with."""

from __future__ import annotations

from typing import Any

from cachetools import FIFOCache

from .memory import Memory
from .wire import Decision


def describe(name: str, memory: Memory, decision: Decision) -> dict[str, Any]:
    """A decision as JSON: the bundle, the gate's part, and the entries by decreasing weight."""
    record, spec = memory.metadata.adapter_of(decision.task), decision.injection
    entries = zip(spec.entries, spec.weights, strict=True) if spec is not None else ()
    return {
        "bundle": name,
        "digest": memory.digest,
        "form": memory.metadata.form,
        "weighting": memory.weighting,
        "start": spec.start if spec is not None else None,
        "adapter": record.digest if record is not None else None,
        "num_entries": memory.num_entries,
        "gate": _describe_gate(memory, decision),
        "remainder": spec is not None and spec.remainder and len(spec.entries) < memory.num_entries,
        "entries": [
            {"index": index, "id": memory.entries[index].id, "task": memory.entries[index].task, "weight": weight}
            for index, weight in entries
        ],
    }


def _describe_gate(memory: Memory, decision: Decision) -> dict[str, Any] | None:
    """None without a gate. For a closed gate the task is null, and for an open one the reason why it is closed."""
    if decision.margins is None:
        return None
    return {
        "open": decision.task is not None,
        "task": decision.task,
        "closed": decision.closed,
        "margins": dict(zip(memory.metadata.gate_tasks, decision.margins, strict=True)),
    }


class TraceLog:
    """The latest `capacity` traces by owner, cache salt and request id.

    Clients may choose the ids of their requests: a trace is found by its owner alone, and never overwritten.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._traces: FIFOCache[tuple[str, str | None, str], dict[str, Any]] = FIFOCache(capacity)

    def put(self, owner: str, cache_salt: str | None, request_id: str, trace: dict[str, Any]) -> None:
        self._traces.setdefault((owner, cache_salt, request_id), trace)

    def drop(self, digest: str) -> None:
        """Drop the traces of answers with this version of a memory."""
        for key in [key for key, trace in self._traces.items() if trace["digest"] == digest]:
            del self._traces[key]

    def of_response(self, owner: str, cache_salt: str | None, response_id: str) -> list[dict[str, Any]]:
        """Return the traces of one HTTP response: one per prompt, or one per turn of a response with tool calls.

        vLLM names the engine requests of such a response by its id and a running number.
        """
        if (trace := self._traces.get((owner, cache_salt, response_id))) is not None:
            return [trace]
        for separator in "-_":
            traces: list[dict[str, Any]] = []
            while (
                trace := self._traces.get((owner, cache_salt, f"{response_id}{separator}{len(traces)}"))
            ) is not None:
                traces.append(trace)
            if traces:
                return traces
        return []
