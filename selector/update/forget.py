"""The next version of a bundle, without some of its entries and facts.

What is left is as before, to the bit: payloads, keys, calibration, the gate's prototypes and its rows of the tasks that
are left.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from inducekv_vllm.bundle import Bundle, Record
from inducekv_vllm.errors import BundleError


@dataclass(frozen=True)
class Forgotten:
    """Which entries and facts are to be forgotten: those that one of these names."""

    ids: Collection[str] = ()
    tasks: Collection[str] = ()

    def names(self, record: Record) -> bool:
        return record.id in self.ids or record.task in self.tasks


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


def without_entries(bundle: Bundle, rows: Collection[int], forgotten: Forgotten = NOTHING) -> Bundle:
    """The next version without these rows, and without the rows of gone tasks in the gate.

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
    return bundle.take(kept, facts=facts)
