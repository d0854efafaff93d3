"""What a traced request was answered with: kept for the response, and for a later question about it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..gate import Relevance
from .memory_index import Memory
from .wire import MemoryOrder


def describe_order(name: str, memory: Memory, order: MemoryOrder | None, relevance: Relevance | None) -> dict[str, Any]:
    """JSON: the bundle by name and digest, the gate's verdict, and every entry used, by falling weight."""
    entries = zip(order.entries, order.weights, strict=True) if order is not None else ()
    return {
        "bundle": name,
        "digest": memory.digest,
        "weighting": memory.weighting,
        "num_entries": memory.num_entries,
        "gate": _describe_gate(memory, relevance),
        "remainder": order is not None and order.remainder and len(order.entries) < memory.num_entries,
        "entries": [
            {"index": index, "id": memory.entries[index].id, "task": memory.entries[index].task, "weight": weight}
            for index, weight in entries
        ],
    }


def _describe_gate(memory: Memory, relevance: Relevance | None) -> dict[str, Any] | None:
    """None for a memory without a gate; closed, the task is null and no entry is used."""
    if memory.gate is None or relevance is None:
        return None
    return {
        "open": relevance.task is not None,
        "task": relevance.task,
        "margins": dict(zip(memory.gate.tasks, relevance.margins.tolist(), strict=True)),
    }


class TraceLog:
    """The latest `capacity` traces by request id."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._traces: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def put(self, request_id: str, trace: dict[str, Any]) -> None:
        self._traces[request_id] = trace
        self._traces.move_to_end(request_id)
        if len(self._traces) > self._capacity:
            self._traces.popitem(last=False)

    def of_response(self, response_id: str) -> list[dict[str, Any]]:
        """The traces of one HTTP response: one for each of its prompts, or of its turns where it called tools.

        vLLM names the engine requests of such a response by its id and a running number.
        """
        if response_id in self._traces:
            return [self._traces[response_id]]
        found: list[dict[str, Any]] = []
        for separator in "-_":
            while (part := self._traces.get(f"{response_id}{separator}{len(found)}")) is not None:
                found.append(part)
            if found:
                break
        return found
