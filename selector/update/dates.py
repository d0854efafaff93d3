"""Dates of the entries that an update has made."""

from __future__ import annotations

from datetime import datetime

from inducekv_vllm.bundle import Bundle, EntryRecord, with_entries


def with_dates(bundle: Bundle, previous: Bundle | None, created_at: datetime, expires_at: datetime | None) -> Bundle:
    """The bundle with these dates for the entries that `previous` does not have; those keep theirs.

    Args:
        created_at: in UTC, in whole seconds.
        expires_at: likewise; None for never.
    """
    held = {entry.id for entry in previous.metadata.entries} if previous is not None else set()

    def of(entry: EntryRecord) -> EntryRecord:
        dates = {"created_at": created_at, "expires_at": expires_at}
        return entry if entry.id in held else entry.model_copy(update=dates)

    return with_entries(bundle, tuple(map(of, bundle.metadata.entries)))
