"""What is shown of the names that a server serves. Paths and reasons are the admin's."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from inducekv_vllm.errors import UnknownBundle

from .adapters import task_adapters
from .changes import Change
from .names import Names
from .schemas import (
    BundleState,
    DrainingMemory,
    MemoryBundleCard,
    MemoryBundleDetail,
    MemoryBundleList,
    MemoryFailure,
    MemoryVersion,
)
from .state import Attempt, VersionRecord


def card(names: Names, name: str, is_admin: bool) -> MemoryBundleCard:
    """The bundle that a name stands for; requests are those of this API process.

    Raises:
        UnknownBundle: no bundle of this name is loaded.
    """
    known = names.known(name)
    served, records, memory = known.served, known.records, known.memory
    version = names.versions.get(served.digest)
    fields: dict[str, Any] = {
        field: getattr(memory.metadata, field)
        for field in ("digest", "budget", "payload_tokens", "form", "weighting", "activations", "adapter")
    }
    return MemoryBundleCard(
        name=name,
        path=records[0].source if is_admin else None,
        entries=memory.num_entries,
        facts=len(memory.metadata.facts),
        expired_entries=memory.num_entries - len(memory.alive()),
        task_adapters={t: each.lora_path if is_admin else None for t, each in task_adapters(memory).items()},
        tasks=dict(Counter(entry.task for entry in memory.entries)),
        gate_tasks=list(memory.metadata.gate_tasks) or None,
        file_bytes=memory.file_bytes,
        is_resident=served.resident_bytes is not None,
        resident_bytes=served.resident_bytes or 0,
        pinned=known.is_pinned,
        active_requests=version.active if version is not None else 0,
        versions=[_version(record, is_admin) for record in records],
        **fields,
    )


def listing(names: Names, is_admin: bool, after: str, limit: int) -> MemoryBundleList:
    """The next names in alphabetical order, and the versions that drain. Any thread may call it."""
    draining = [version for version in list(names.versions.values()) if not version.is_named]
    found = names.page(after, limit + 1)
    cards = []
    for name, _ in found[:limit]:
        with contextlib.suppress(UnknownBundle):  # it was unloaded a moment ago
            cards.append(card(names, name, is_admin))
    return MemoryBundleList(
        data=cards,
        has_more=len(found) > limit,
        draining=[DrainingMemory(digest=v.memory.digest, active_requests=v.active) for v in draining],
    )


def detail(names: Names, name: str, attempt: Attempt, is_admin: bool) -> MemoryBundleDetail:
    """What is known of a name, with the last change of it that was tried.

    Raises:
        UnknownBundle: no bundle of this name is loaded, on its way or draining, and none has failed lately.
    """
    left = names.versions.get(attempt.left_digest or "")
    bundle = None
    with contextlib.suppress(UnknownBundle):
        bundle = card(names, name, is_admin)
    state: BundleState
    if bundle is not None:
        state = "ready"
    elif attempt.loading:
        state = "loading"
    elif attempt.reason is not None:
        state = "failed"
    elif left is not None and not left.is_named:
        state = "draining"
    else:
        raise UnknownBundle(f"no memory bundle {name!r:.200} is loaded")
    failure = None
    if attempt.change is not None and attempt.at is not None:
        reason = attempt.reason if is_admin else None
        failure = MemoryFailure(change=Change(attempt.change), reason=reason, at=attempt.at)
    return MemoryBundleDetail(name=name, state=state, loading=attempt.loading, failure=failure, bundle=bundle)


def _version(record: VersionRecord, is_admin: bool) -> MemoryVersion:
    return MemoryVersion(
        digest=record.digest,
        parent_digest=record.parent_digest,
        loaded_at=record.loaded_at,
        by=record.by if is_admin else None,
        source=record.source if is_admin else None,
    )
