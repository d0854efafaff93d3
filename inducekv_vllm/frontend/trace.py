"""Traces: which entries and weights a request was answered with."""

from __future__ import annotations

from typing import Any

from ..protocol import Decision
from .served_bundle import ServedBundle


def describe(name: str, memory: ServedBundle, decision: Decision) -> dict[str, Any]:
    """A decision as JSON: the bundle, the gate's part, and the entries by decreasing weight."""
    record = memory.metadata.adapter_of(decision.task)
    return {
        "bundle": name,
        "digest": memory.digest,
        "form": memory.metadata.form,
        "weighting": memory.weighting,
        "start": decision.first_active,
        "adapter": record.digest if record is not None else None,
        "num_entries": memory.num_entries,
        "gate": describe_gate(memory, decision),
        "remainder": decision.keeps_remainder and len(decision.entries) < memory.num_entries,
        "entries": [
            {"index": index, "id": memory.entries[index].id, "task": memory.entries[index].task, "weight": weight}
            for index, weight in decision.entries
        ],
        "facts": describe_facts(memory, decision),
    }


def describe_facts(memory: ServedBundle, decision: Decision) -> list[dict[str, Any]]:
    """The facts that were found, with their part in the next token's distribution."""
    if decision.facts is None:
        return []
    answers, records = decision.facts.answers, memory.metadata.facts
    return [
        {
            "id": records[number].id,
            "task": records[number].task,
            "score": decision.facts.score,
            "weight": answers.weight * share,
        }
        for number, share in zip(decision.facts.facts, answers.shares, strict=True)
    ]


def describe_gate(memory: ServedBundle, decision: Decision) -> dict[str, Any] | None:
    """None without a gate. For a closed gate the task is null, and for an open one the reason why it is closed."""
    if decision.margins is None:
        return None
    return {
        "open": decision.task is not None,
        "task": decision.task,
        "closed": decision.closed,
        "margins": dict(zip(memory.metadata.gate_tasks, decision.margins, strict=True)),
    }
