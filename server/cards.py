"""What is shown of the names that a server serves. Paths are the admin's."""

import contextlib
from collections import Counter

from inducekv_vllm.errors import UnknownBundle

from .pool import Pool
from .schemas import DrainingMemory, MemoryBundleCard, MemoryBundleList, MemoryVersion
from .state import ServerState, VersionRecord


def card(server_state: ServerState, pool: Pool, name: str, is_admin: bool) -> MemoryBundleCard:
    """The bundle that a name stands for; requests are those of this API process.

    Raises:
        UnknownBundle: no bundle of this name is loaded.
    """
    known = server_state.known(name)
    served, records, memory = known.served, known.records, known.memory
    version = pool.find(served.digest)
    return MemoryBundleCard(
        name=name,
        path=records[0].source if is_admin else None,
        digest=memory.digest,
        entries=memory.num_entries,
        facts=len(memory.metadata.facts),
        expired_entries=memory.num_entries - len(memory.alive()),
        tasks=dict(Counter(entry.task for entry in memory.entries)),
        file_bytes=memory.file_bytes,
        is_resident=served.resident_bytes is not None,
        resident_bytes=served.resident_bytes or 0,
        pinned=known.is_pinned,
        active_requests=version.leases if version is not None else 0,
        versions=[_version(record, is_admin) for record in records],
    )


def listing(server_state: ServerState, pool: Pool, is_admin: bool, after: str, limit: int) -> MemoryBundleList:
    """The next names in alphabetical order, and the versions that drain. Any thread may call it."""
    draining = [version for version in pool.resident.values() if not version.is_named]
    found = server_state.page(after, limit + 1)
    cards = []
    for name, _ in found[:limit]:
        with contextlib.suppress(UnknownBundle):  # it was unloaded a moment ago
            cards.append(card(server_state, pool, name, is_admin))
    return MemoryBundleList(
        data=cards,
        has_more=len(found) > limit,
        draining=[DrainingMemory(digest=v.digest, active_requests=v.leases) for v in draining],
    )


def _version(record: VersionRecord, is_admin: bool) -> MemoryVersion:
    return MemoryVersion(
        digest=record.digest,
        parent_digest=record.parent_digest,
        loaded_at=record.loaded_at,
        by=record.by if is_admin else None,
        source=record.source if is_admin else None,
    )
