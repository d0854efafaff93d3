"""What a server serves: what each name stands for, and stood for before, each version's content, pins and tags."""

import json
import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from inducekv_vllm.bundle.metadata import BundleMetadata
from inducekv_vllm.errors import CapacityError, UnknownBundle
from inducekv_vllm.files import audit_chain
from inducekv_vllm.frontend.served_bundle import ServedBundle

from .file import StateFile

LARGEST_KEPT: Final = 10**9  # bytes of a bundle: SQLite's limit
DROP_UNUSED: Final = (
    "DELETE FROM contents WHERE digest = ?1 AND resident_bytes IS NULL "
    "AND NOT EXISTS (SELECT * FROM versions WHERE digest = ?1)",
    "DELETE FROM traces WHERE ?1 IN (digest, trace ->> '$.shared.digest') "
    "AND NOT EXISTS (SELECT * FROM contents WHERE digest = ?1)",
)
IS_PINNED: Final = (
    "EXISTS (SELECT * FROM versions JOIN pins USING (name) WHERE versions.digest = contents.digest AND served)"
)
RECORD: Final = "name, digest, parent, loaded_at, by, source"
SERVED: Final = (
    "SELECT digest, resident_bytes, tag FROM versions JOIN contents USING (digest) LEFT JOIN tags USING (name) "
    "WHERE name = ? AND served"
)
MEMORY: Final = "SELECT digest, metadata, path, file_bytes FROM contents WHERE digest = ?"
IS_NAMED: Final = "EXISTS (SELECT * FROM versions WHERE versions.digest = contents.digest AND served)"


@dataclass(frozen=True)
class VersionRecord:
    """One version of a name."""

    name: str
    digest: str
    parent_digest: str | None  # of the memory that it was made from
    loaded_at: datetime  # when the name began to stand for it
    by: str  # who asked for it
    source: str  # the path that it was loaded from


@dataclass(frozen=True)
class Pointed:
    """A version that a name is to stand for."""

    record: VersionRecord
    memory: ServedBundle
    event: str  # how the audit chain names the change
    resident_bytes: int | None = None  # in the pool of one rank; None if it was not made resident now
    bundle: bytes | None = None  # the content of its file, to be kept
    keep: int = 1  # at most so many versions of the name are kept
    pin: bool | None = None  # whether the name's versions stay in the pool; None as before
    tag: str | None = None  # what a resolver has said of the file; None for any other name


@dataclass(frozen=True)
class Served:
    """What a name stands for now."""

    digest: str
    resident_bytes: int | None  # in the pool of one rank; None if it is not resident
    tag: str | None  # of a name that a resolver has found: what changes when its file does


@dataclass(frozen=True)
class Known:
    """What is known of a name at one moment."""

    served: Served
    records: tuple[VersionRecord, ...]  # of its versions, the served one first
    memory: ServedBundle  # what it stands for, resident or not
    is_pinned: bool


@dataclass(frozen=True)
class Resident:
    """A version that is resident."""

    memory: ServedBundle
    nbytes: int  # in the pool of one rank
    is_named: bool  # whether a name stands for it
    is_pinned: bool  # whether a pinned name does


@dataclass(frozen=True)
class Snapshot:
    """What is resident at one moment, and what some names stand for."""

    resident: dict[str, Resident]  # by digest
    names: dict[str, str]  # the digest of each


class ServedState(StateFile):
    """See the module docstring."""

    _memories: dict[str, ServedBundle]  # of what is resident, by digest

    def snapshot(self, names: Iterable[str] = ()) -> Snapshot:
        """What is resident, and what these names stand for, those that stand for something."""
        with self._moment():
            rows = self._read(
                f"SELECT digest, resident_bytes, {IS_NAMED}, {IS_PINNED} FROM contents WHERE resident_bytes IS NOT NULL"
            )
            new = [self._read(MEMORY, row[:1])[0] for row in rows if row[0] not in self._memories]
            served = self._read(
                "SELECT name, digest FROM versions WHERE served AND name IN (SELECT value FROM json_each(?))",
                (json.dumps(list(names)),),
            )
        known = {**self._memories, **{digest: _memory(*of_it) for digest, *of_it in new}}
        self._memories = {digest: known[digest] for digest, *_ in rows}
        resident = {
            digest: Resident(known[digest], nbytes, bool(is_named), bool(is_pinned))
            for digest, nbytes, is_named, is_pinned in rows
        }
        return Snapshot(resident, dict(served))

    def find(self, name: str) -> Served | None:
        """What a name stands for, None for nothing."""
        found = self._now(SERVED, (name,))
        return Served(*found[0]) if found else None

    def served(self, name: str) -> Served:
        """What a name stands for. Raises UnknownBundle: no bundle of this name is loaded."""
        if (found := self.find(name)) is None:
            raise UnknownBundle(f"no memory bundle {name!r} is loaded")
        return found

    def known(self, name: str) -> Known:
        """All that is known of a name. Raises UnknownBundle: no bundle of this name is loaded."""
        with self._moment():
            if not (found := self._read(SERVED, (name,))):
                raise UnknownBundle(f"no memory bundle {name!r} is loaded")
            served, is_pinned = Served(*found[0]), bool(self._read("SELECT 1 FROM pins WHERE name = ?", (name,)))
            return Known(served, self.records(name), self.memory(served.digest), is_pinned)

    def is_named(self, digest: str) -> bool:
        return bool(self._now("SELECT 1 FROM versions WHERE digest = ? AND served", (digest,)))

    def memory(self, digest: str) -> ServedBundle:
        """The API process's part of a version. Raises UnknownBundle: nothing is kept of it."""
        if (memory := self._memories.get(digest)) is not None:
            return memory
        if not (found := self._read(MEMORY, (digest,))):
            raise UnknownBundle(f"nothing is kept of the version {digest}")
        return _memory(*found[0][1:])

    def hold(self, digest: str) -> bool:
        """A request of this process begins to use a version, as its only one; it is resident until `end_hold`.

        False: it is not, or it is about to leave the pool.
        """
        if not self._begin_use(digest):
            return False
        if self.is_resident(digest) and not self.is_leaving(digest):
            return True
        self.end_hold(digest)
        return False

    def is_resident(self, digest: str) -> bool:
        return bool(self._now("SELECT 1 FROM contents WHERE digest = ? AND resident_bytes IS NOT NULL", (digest,)))

    def page(self, after: str, limit: int) -> list[tuple[str, str]]:
        """The next names in alphabetical order, with the digests that they stand for."""
        statement = "SELECT name, digest FROM versions WHERE served AND name > ? ORDER BY name LIMIT ?"
        return self._read(statement, (after, limit))

    def found_first(self) -> str | None:
        """Of the names that a resolver has found, the one that was found before all others."""
        found = self._read("SELECT name FROM versions JOIN tags USING (name) WHERE served ORDER BY number LIMIT 1")
        return found[0][0] if found else None

    def num_names(self) -> int:
        """How many names stand for something."""
        ((number,),) = self._read("SELECT count(*) FROM versions WHERE served")
        return int(number)

    def records(self, name: str) -> tuple[VersionRecord, ...]:
        """The versions of a name, served or not, the newest first."""
        rows = self._read(f"SELECT {RECORD} FROM versions WHERE name = ? ORDER BY number DESC", (name,))
        return tuple(_record(row) for row in rows)

    def names_of(self, who: str) -> list[str]:
        """The names that stand for what this one has loaded, in that order."""
        return [
            name for (name,) in self._read("SELECT name FROM versions WHERE served AND by = ? ORDER BY number", (who,))
        ]

    @property
    def pinned(self) -> list[str]:
        """The pinned names that stand for something, in the order in which they were loaded."""
        return [
            name
            for (name,) in self._read("SELECT name FROM versions JOIN pins USING (name) WHERE served ORDER BY number")
        ]

    def kept(self, digest: str) -> tuple[str, bytes | None]:
        """Where a version was loaded from, and its bundle, if that is kept."""
        ((path, bundle),) = self._read("SELECT path, bundle FROM contents WHERE digest = ?", (digest,))
        return path, bundle

    def point(self, to: Pointed) -> str | None:
        """Let a name stand for a version; return what it stood for before, if no name does any more.

        Raises:
            CapacityError, StateError: it cannot be recorded. Nothing has changed.
        """
        record, memory, bundle = to.record, to.memory, to.bundle
        if bundle is not None and len(bundle) > LARGEST_KEPT:
            raise CapacityError(f"a bundle of {len(bundle)} bytes cannot be kept in the state file: {LARGEST_KEPT} are")
        loaded_at, name = record.loaded_at.isoformat(), record.name
        row = (name, record.digest, record.parent_digest, loaded_at, record.by, record.source)
        metadata = memory.metadata.model_dump_json()
        with self._transaction() as rows:
            before, replaced = _digests(rows, name), _served(rows, name)
            audit_chain.append(rows, to.event, _details_of(record, replaced))
            newest = rows.execute(
                "SELECT digest, source FROM versions WHERE name = ? ORDER BY number DESC LIMIT 1", (name,)
            ).fetchone()
            if newest != (record.digest, record.source):
                rows.execute("DELETE FROM versions WHERE name = ? AND digest = ?", row[:2])
                (number,) = rows.execute("SELECT coalesce(max(number), 0) + 1 FROM versions").fetchone()
                rows.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, FALSE)", (number, *row))
            rows.execute("UPDATE versions SET served = (digest = ?) WHERE name = ?", (record.digest, name))
            rows.execute(
                "DELETE FROM versions WHERE name = ?1 AND number NOT IN "
                "(SELECT number FROM versions WHERE name = ?1 ORDER BY number DESC LIMIT ?2)",
                (name, to.keep),
            )
            rows.execute(
                "INSERT INTO contents VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET metadata = excluded.metadata, "
                "path = excluded.path, file_bytes = excluded.file_bytes, "
                "resident_bytes = coalesce(excluded.resident_bytes, resident_bytes), "
                "bundle = coalesce(excluded.bundle, bundle)",
                (record.digest, metadata, memory.path, memory.file_bytes, to.resident_bytes, bundle),
            )
            if to.pin is not None:
                rows.execute(
                    "INSERT OR IGNORE INTO pins VALUES (?)" if to.pin else "DELETE FROM pins WHERE name = ?", (name,)
                )
            rows.execute("DELETE FROM tags WHERE name = ?", (name,))
            if to.tag is not None:
                rows.execute("INSERT INTO tags VALUES (?, ?)", (name, to.tag))
            rows.execute(
                "DELETE FROM uses WHERE name = ? AND fact NOT IN (SELECT value FROM json_each(?))",
                (name, json.dumps([fact.id for fact in memory.metadata.facts])),
            )
            drop_unused(rows, before)
            return _unnamed(rows, replaced)

    def unload(self, name: str, who: str) -> str | None:
        """Forget a name; return what it stood for, if no name does any more.

        Raises:
            CapacityError, StateError: it cannot be recorded, and nothing has changed.
        """
        with self._transaction() as rows:
            before, served = _digests(rows, name), _served(rows, name)
            audit_chain.append(rows, "unload", {"name": name, "digest": served, "by": who})
            for table in ("versions", "uses", "pins", "tags"):
                rows.execute(f"DELETE FROM {table} WHERE name = ?", (name,))
            drop_unused(rows, before)
            return _unnamed(rows, served)

    def forget_tag(self, name: str) -> None:
        """What a resolver has found for a name cannot be read any more: it is another file to whoever looks again."""
        with self._transaction(durable=False) as rows:
            rows.execute("UPDATE tags SET tag = '' WHERE name = ?", (name,))

    def bring(self, digest: str, resident_bytes: int) -> None:
        """A version that a name stands for is resident again."""
        with self._transaction(durable=False) as rows:
            rows.execute("UPDATE contents SET resident_bytes = ? WHERE digest = ?", (resident_bytes, digest))

    def evict(self, digest: str) -> bool:
        """A version is to leave the pool, unless another process uses it; call it while this one does not."""
        with self._unused(digest) as is_unused:
            if is_unused:
                with self._transaction(durable=False) as rows:
                    rows.execute("UPDATE contents SET resident_bytes = NULL WHERE digest = ?", (digest,))
            return is_unused

    def forget(self, name: str, digests: Collection[str], who: str) -> list[str]:
        """Drop earlier versions of a name; return those that are still used or kept otherwise.

        Raises:
            CapacityError, StateError: it cannot be recorded. Nothing has changed.
        """
        with self._transaction() as rows:
            details = {"name": name, "digests": list(digests), "served": _served(rows, name), "by": who}
            audit_chain.append(rows, "forget", details)
            for digest in digests:
                rows.execute("DELETE FROM versions WHERE name = ? AND digest = ?", (name, digest))
            drop_unused(rows, digests)
            in_use = [
                digest
                for digest in digests
                if rows.execute("SELECT 1 FROM contents WHERE digest = ?", (digest,)).fetchone()
            ]
        self._erase_log()
        return in_use

    def release(self, digest: str) -> bool:
        """Whether neither a name nor another process uses a resident version; it is not resident from now on.

        Call it while this process does not use it.
        """
        with self._unused(digest) as is_unused, self._transaction() as rows:
            if not is_unused or _unnamed(rows, digest) is None:
                return False
            statement = "UPDATE contents SET resident_bytes = NULL WHERE digest = ? AND resident_bytes IS NOT NULL"
            was_resident = rows.execute(statement, (digest,)).rowcount == 1
            drop_unused(rows, [digest])
        self._erase_log()
        return was_resident


def _memory(metadata: str, path: str, file_bytes: int) -> ServedBundle:
    return ServedBundle(BundleMetadata.model_validate_json(metadata), path, file_bytes)


def _served(rows: sqlite3.Connection, name: str) -> str | None:
    found = rows.execute("SELECT digest FROM versions WHERE name = ? AND served", (name,)).fetchone()
    return found and str(found[0])


def _digests(rows: sqlite3.Connection, name: str) -> list[str]:
    """Of all versions of a name."""
    return [digest for (digest,) in rows.execute("SELECT digest FROM versions WHERE name = ?", (name,))]


def _unnamed(rows: sqlite3.Connection, digest: str | None) -> str | None:
    """The digest, if no name stands for it."""
    is_named = rows.execute("SELECT 1 FROM versions WHERE digest = ? AND served", (digest,)).fetchone()
    return None if is_named else digest


def _details_of(record: VersionRecord, before: str | None) -> dict[str, Any]:
    details = {"name": record.name, "digest": record.digest, "parent": record.parent_digest, "before": before}
    return {**details, "by": record.by, "source": record.source}


def drop_unused(rows: sqlite3.Connection, digests: Iterable[str]) -> None:
    """Contents that nothing needs go, of these, with their traces."""
    for digest in digests:
        for statement in DROP_UNUSED:
            rows.execute(statement, (digest,))


def _record(row: tuple[str, str, str | None, str, str, str]) -> VersionRecord:
    name, digest, parent, loaded_at, by, source = row
    return VersionRecord(name, digest, parent, datetime.fromisoformat(loaded_at), by, source)
