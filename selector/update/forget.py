"""The next version of a bundle, without some of its entries and facts.

What is left is as before, to the bit: payloads, keys, calibration, the gate's prototypes and its rows of the tasks that
are left. The gate is fitted again where that is asked for, to anchors of these tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from inducekv_vllm.bundle import Bundle, Gate, Record
from inducekv_vllm.errors import BundleError, ConfigError

from ..backbone.model import Backbone
from ..data.examples import Example
from ..gate.data import GateData
from ..gate.fit import FittedGate, fit_gate
from ..gate.settings import GateOptions


@dataclass(frozen=True)
class Forgotten:
    """Which entries and facts are to be forgotten: those that one of these names."""

    ids: Collection[str] = ()
    source_digests: Collection[str] = ()
    tasks: Collection[str] = ()

    def names(self, record: Record) -> bool:
        return record.id in self.ids or record.source_digest in self.source_digests or record.task in self.tasks


NOTHING: Final = Forgotten()


def rows_to_forget(bundle: Bundle, forgotten: Forgotten, source: str) -> list[int]:
    """The entries that are named.

    Raises:
        BundleError: an id, digest or task is not in the bundle, or no entry would be left.
    """
    entries, facts = bundle.metadata.entries, bundle.metadata.facts
    records = (*entries, *facts)
    for kind, wanted, found in (
        ("entry", forgotten.ids, {record.id for record in records}),
        ("entry of the source digest", forgotten.source_digests, {record.source_digest for record in records}),
        ("entry of the task", forgotten.tasks, {record.task for record in records}),
    ):
        if missing := [each for each in wanted if each not in found]:
            raise BundleError(f"{source}: there is no {kind} {missing[0]!r}")
    rows = [row for row, entry in enumerate(entries) if forgotten.names(entry)]
    are_facts_left = not all(map(forgotten.names, facts))
    if len(rows) == len(entries) and not bundle.metadata.task_adapters and not are_facts_left:
        raise BundleError(
            f"{source}: all {len(entries)} entries would be forgotten, and a bundle needs one: unload the bundle and "
            "delete its file instead"
        )
    return rows


def without_entries(
    bundle: Bundle, rows: Collection[int], gate: Gate | None = None, forgotten: Forgotten = NOTHING
) -> Bundle:
    """The next version without these rows; `gate` replaces the gate, of which otherwise the rows of gone tasks go.

    Facts go that are `forgotten`, and those of tasks whose last entry goes. It is not signed.
    """
    metadata, gone = bundle.metadata, set(rows)
    kept = [row for row in range(bundle.num_entries) if row not in gone]
    tasks = {metadata.entries[row].task for row in kept}
    facts = tuple(
        fact
        for fact in metadata.facts
        if not forgotten.names(fact) and (fact.task in tasks or fact.task not in metadata.tasks)
    )
    other_gate = {} if gate is None else {"gate": gate}
    return bundle.take(kept, facts=facts, **other_gate)


def refitted_gate(
    backbone: Backbone,
    bundle: Bundle,
    rows: Collection[int],
    anchors: Sequence[Example],
    others: GateData,
    forgotten: Forgotten = NOTHING,
    *,
    progress: bool = False,
) -> FittedGate | None:
    """A gate for the tasks that are left, fitted to their anchors alone; None without a gate, or if none is left.

    Anchors of gone tasks, and those that a forgotten entry was made from, are not used. The gate may miss the same
    share of own questions as before.

    Args:
        rows, forgotten: as of `without_entries`.
        others: what it is to stay closed for.

    Raises:
        FingerprintMismatch: the bundle was made for another backbone.
        BundleError: the bundle's tasks have adapters.
        ConfigError: there are no anchors of a task, no base questions, background requests or near-misses although the
            gate was fitted to some, or no gate can tell the tasks apart.
        TaskDataError: a base question is one of a task's.
    """
    metadata = bundle.metadata
    if bundle.gate is None or not (tasks := without_entries(bundle, rows, forgotten=forgotten).metadata.gate_tasks):
        return None
    bundle.require_backbone(backbone.fingerprint, "the bundle")
    if metadata.task_adapters:
        raise BundleError("the gate of a bundle with task adapters is fitted by `inducekv-bundle route`")
    if metadata.settings.get("base_questions") and not others.base:
        raise ConfigError("the gate was fitted to base questions too, and would let them in without: give --base")
    if metadata.settings.get("background_requests") and not others.background:
        raise ConfigError("the gate was fitted to background requests of yours too: give --background")
    if metadata.settings.get("near_misses") and not others.near_misses:
        raise ConfigError("the gate was fitted to near-misses too, and would let them in without: give --not")
    gone = set(rows)
    left = {entry.source_digest for row, entry in enumerate(metadata.entries) if row not in gone}
    sources = {metadata.entries[row].source_digest for row in gone} - left
    own = {}
    for task in tasks:
        examples = [each for each in anchors if each.task == task and each.source_digest not in sources]
        if not examples:
            raise ConfigError(f"the gate cannot be fitted again: there are no anchors of the task {task!r}")
        own[task] = examples
    misses, seed = metadata.settings.get("gate_misses"), int(metadata.settings.get("seed", 0))
    return fit_gate(backbone, others.of(own), GateOptions.again(bundle.gate, misses, seed), progress=progress)
