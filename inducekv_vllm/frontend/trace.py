"""Traces: which entries and weights of which memories a request was answered with."""

from collections.abc import Sequence
from typing import Any

from ..protocol import Decided, Decision
from .served_bundle import ServedBundle


def describe(memories: Sequence[tuple[str, ServedBundle]], decided: Decided) -> dict[str, Any]:
    """What was decided as JSON: that about the request's own memory and, in it, that about the shared one, or null."""
    own, *others = (_one(*memory, decision) for memory, decision in zip(memories, decided.each, strict=True))
    return {**own, "shared": others[0] if others else None}


def _one(name: str, memory: ServedBundle, decision: Decision) -> dict[str, Any]:
    """The bundle, the gate's part, and the entries by decreasing weight."""
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
        "remainder": memory.weighting == "sqrt" and 0 < len(decision.entries) < memory.num_entries,
        "entries": [
            {"index": index, "id": memory.entries[index].id, "task": memory.entries[index].task, "weight": weight}
            for index, weight in decision.entries
        ],
        "facts": describe_facts(memory, decision),
        "missed": _missed(memory, decision),
    }


def describe_facts(memory: ServedBundle, decision: Decision) -> list[dict[str, Any]]:
    """The fact that was found, if any, and why it is withheld if the request forbids its answer."""
    if (fact := decision.fact) is None:
        return []
    record = memory.metadata.facts[fact.number]
    return [
        {
            "id": record.id,
            "task": record.task,
            "closeness": fact.closeness,
            "odds": fact.odds,
            "withheld": fact.withheld,
        }
    ]


def describe_missed(memory: ServedBundle, decision: Decision) -> dict[str, Any] | None:
    """The nearest fact that was not found, for those who may read facts: why, and the words of one question alone."""
    if (missed := decision.missed) is None:
        return None
    record = memory.metadata.facts[missed.number]
    words = {"missing": list(missed.missing), "added": list(missed.added)}
    return {"id": record.id, "question": record.question, "why": missed.why, **words}


def _missed(memory: ServedBundle, decision: Decision) -> dict[str, Any] | None:
    """For those who ask: nothing of the stored question but that it is there."""
    if (missed := decision.missed) is None:
        return None
    record = memory.metadata.facts[missed.number]
    return {"id": record.id, "task": record.task, "added": list(missed.added)}


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
