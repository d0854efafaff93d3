"""Dates of the entries and facts that an update has made."""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from inducekv_vllm.bundle import Bundle, EntryRecord, with_metadata

Record = TypeVar("Record", bound=EntryRecord)


def with_dates(bundle: Bundle, previous: Bundle | None, created_at: datetime, expires_at: datetime | None) -> Bundle:
    """The bundle with these dates for the entries and facts that `previous` does not have; those keep theirs.

    Args:
        created_at: in UTC, in whole seconds.
        expires_at: likewise; None for never.
    """
    before = previous.metadata if previous is not None else None
    held = {record.id for record in (*before.entries, *before.facts)} if before is not None else set()

    def of(record: Record) -> Record:
        dates = {"created_at": created_at, "expires_at": expires_at}
        return record if record.id in held else record.model_copy(update=dates)

    metadata = bundle.metadata
    return with_metadata(bundle, entries=tuple(map(of, metadata.entries)), facts=tuple(map(of, metadata.facts)))
