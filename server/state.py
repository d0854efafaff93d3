"""The state of a server, in one SQLite file that all of its API processes share.

    versions    what each name stands for, the newest row first, and what it stood for before
    contents    each version's metadata, its bytes in the pool while it is resident, and its bundle, if it is kept
    pins        the names whose versions stay in the pool
    tags        the names that a resolver has found, with what it said of their files
    attempts    which names are being loaded, and how the last change of each has failed
    traces      what recent responses were answered with, by whom they belong to
    uses        when the facts of a name have last answered, to the minute
    audit       every change, and if asked for every answer, chained

What is resident, attempts and traces are of the running server. A change is one transaction with its record in the
audit chain, and on the disk before it is acknowledged: a server that was killed at any moment serves, when it starts
again, the last acknowledged version or the one that it was about to acknowledge.

Nothing of the names is in the memory of a process: a request reads what its name stands for, which takes microseconds.
Bytes of `FILE.lock` are locked by the server that uses the file, by the process that makes a change, and for each
resident version by the processes whose requests use it; a process that is killed leaves no lock behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from inducekv_vllm.bundle.metadata import BundleMetadata
from inducekv_vllm.errors import CapacityError, ConfigError
from inducekv_vllm.files import audit_chain
from inducekv_vllm.frontend.served_bundle import ServedBundle

APPLICATION: Final = 0x494B5653  # "IKVS", in the file's header
FORMAT: Final = 1
LARGEST_KEPT: Final = 10**9  # bytes of a bundle: SQLite's limit
TRACES: Final = 1024
ATTEMPTS: Final = 256
BUSY_S: Final = 10.0
WAIT_S: Final = 0.1  # for the first process
SERVER, CHANGE, VERSIONS = 0, 1, 2  # bytes of the lock file, and the first of those for versions

SCHEMA: Final = f"""
BEGIN;
CREATE TABLE versions (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, digest TEXT NOT NULL, parent TEXT, loaded_at TEXT NOT NULL,
    by TEXT NOT NULL, source TEXT NOT NULL, served INTEGER NOT NULL, UNIQUE (name, digest)) STRICT;
CREATE TABLE contents (
    digest TEXT PRIMARY KEY, metadata TEXT NOT NULL, path TEXT NOT NULL, file_bytes INTEGER NOT NULL,
    resident_bytes INTEGER, bundle BLOB) STRICT;
CREATE TABLE attempts (
    name TEXT PRIMARY KEY, loading INTEGER NOT NULL, change TEXT, reason TEXT, at TEXT, left_digest TEXT) STRICT;
CREATE TABLE traces (
    owner TEXT NOT NULL, salt TEXT NOT NULL, response TEXT NOT NULL, digest TEXT NOT NULL, trace TEXT NOT NULL,
    UNIQUE (owner, salt, response)) STRICT;
CREATE TABLE server (run TEXT NOT NULL) STRICT;
{audit_chain.TABLE}
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORMAT};
COMMIT;
"""
# Not in the schema: files of earlier versions lack it.
ADDED: Final = """
CREATE TABLE IF NOT EXISTS uses (
    name TEXT NOT NULL, fact TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (name, fact)) STRICT;
CREATE TABLE IF NOT EXISTS pins (name TEXT PRIMARY KEY) STRICT;
CREATE TABLE IF NOT EXISTS tags (name TEXT PRIMARY KEY, tag TEXT NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS versions_digest ON versions (digest);
CREATE INDEX IF NOT EXISTS contents_resident ON contents (digest) WHERE resident_bytes IS NOT NULL;
"""
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
class Attempt:
    """The last change of a name, and those that run."""

    loading: bool
    change: str | None  # that has failed; None if none has since
    reason: str | None
    at: datetime | None
    left_digest: str | None  # what the name stood for when it was unloaded


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


class ServerState:
    """See the module docstring. Any thread may call it."""

    def __init__(self, path: str | Path, *, keeps_bundles: bool, process: int = 0) -> None:
        """Open the file, or begin one that only its owner can read.

        Args:
            keeps_bundles: whether bundles are kept in it.
            process: the number of the server's API process. The first one, 0, begins the file; the others wait for it.

        Raises:
            ConfigError: it is something else, of another version, in use, or cannot be written.
        """
        self.path, self.keeps_bundles, self.process = Path(path).absolute(), keeps_bundles, process
        self._lock, self._read_lock, self._watch_lock = threading.Lock(), threading.RLock(), threading.Lock()
        self._memories: dict[str, ServedBundle] = {}  # by digest
        with _as_config_error(f"{self.path}: cannot be used as a state file"):
            while not check_state_file(self.path) and process:
                time.sleep(WAIT_S)
            self._locks = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not process and not self._take(SERVER):
                raise ConfigError(f"{self.path}: another server uses this state file")
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._durable, self._quick, self._reading, self._watch = (self._connect() for _ in range(4))
            self._quick.execute("PRAGMA synchronous = NORMAL")  # the operating system has it, the disk may not
            if self._durable.execute("PRAGMA application_id").fetchone() == (0,):
                self._durable.executescript(SCHEMA)
            self._durable.executescript(ADDED)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def close(self) -> None:
        """Let another server use the file."""
        with self._lock, self._read_lock:
            for connection in (self._durable, self._quick, self._reading, self._watch):
                connection.close()
            os.close(self._locks)

    # ---- one change at a time, whichever process makes it --------------------------------------------------------

    def _take(self, byte: int) -> bool:
        try:
            self._lock_byte(fcntl.F_WRLCK, byte)
        except OSError:
            return False
        return True

    def _lock_byte(self, kind: int, byte: int) -> None:
        """Of this open file, not of the process (fcntl(2), "Open file description locks")."""
        fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))

    def begin_change(self) -> bool:
        """Whether this process may make a change now. The lock of a process that is killed ends with it."""
        return self._take(CHANGE)

    def end_change(self) -> None:
        self._lock_byte(fcntl.F_UNLCK, CHANGE)

    def hold(self, digest: str) -> bool:
        """A request of this process begins to use a version, as its only one; False if it is about to leave the pool.

        It is resident until `let_go`.
        """
        try:
            self._lock_byte(fcntl.F_RDLCK, _byte_of(digest))
        except OSError:
            return False
        if self._now("SELECT 1 FROM contents WHERE digest = ? AND resident_bytes IS NOT NULL", (digest,)):
            return True
        self.let_go(digest)
        return False

    def let_go(self, digest: str) -> None:
        """No request of this process uses a version any more."""
        self._lock_byte(fcntl.F_UNLCK, _byte_of(digest))

    @contextlib.contextmanager
    def _unused(self, digest: str) -> Iterator[bool]:
        """Whether no other process uses a version, which then none begins to; call it while this one does not."""
        is_unused = self._take(_byte_of(digest))
        try:
            yield is_unused
        finally:
            if is_unused:
                self.let_go(digest)

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Raises CapacityError: the disk is full. ConfigError: it cannot be written. Nothing has changed then.

        What is not durable survives the end of the server, and with the next durable change that of the machine.
        """
        rows = self._durable if durable else self._quick
        with self._lock, _as_config_error(f"{self.path}: cannot record this; nothing changed"):
            rows.execute("BEGIN IMMEDIATE")
            try:
                yield rows
                rows.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    rows.execute("ROLLBACK")
                raise

    def note(self, event: str, details: Mapping[str, Any]) -> None:
        """Add to the audit chain what has happened already, or an answer that is about to begin."""
        with self._transaction(durable=False) as rows:
            audit_chain.append(rows, event, details)

    # ---- what is served ------------------------------------------------------------------------------------------

    def begin(self, details: Mapping[str, Any]) -> None:
        """A server starts: nothing is resident, and nothing is left of its predecessor's requests."""
        with self._transaction() as rows:
            audit_chain.append(rows, "start", details)
            for table in ("attempts", "traces", "server"):
                rows.execute(f"DELETE FROM {table}")
            resident = rows.execute("SELECT digest FROM contents WHERE resident_bytes IS NOT NULL").fetchall()
            rows.execute("UPDATE contents SET resident_bytes = NULL WHERE resident_bytes IS NOT NULL")
            _drop_unused(rows, [digest for (digest,) in resident])

    def begun(self, run: str) -> None:
        """The server of this run has loaded what it begins with."""
        with self._transaction() as rows:
            rows.execute("INSERT INTO server VALUES (?)", (run,))

    def has_begun(self, run: str) -> bool:
        return bool(self._read("SELECT 1 FROM server WHERE run = ?", (run,)))

    def change_number(self) -> int:
        """Another one after any change, also of this process. It reads memory that the processes share."""
        with self._watch_lock, _as_config_error(f"{self.path}: cannot be read"):
            (number,) = self._watch.execute("PRAGMA data_version").fetchone()
        return int(number)

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

    def served(self, name: str) -> Served | None:
        """What a name stands for, None for nothing."""
        found = self._now(SERVED, (name,))
        return Served(*found[0]) if found else None

    def known(self, name: str) -> Known | None:
        """All that is known of a name that stands for something, None of another one."""
        with self._moment():
            if not (found := self._read(SERVED, (name,))):
                return None
            served, is_pinned = Served(*found[0]), bool(self._read("SELECT 1 FROM pins WHERE name = ?", (name,)))
            return Known(served, self.records(name), self.memory(served.digest), is_pinned)

    def is_named(self, digest: str) -> bool:
        return bool(self._now("SELECT 1 FROM versions WHERE digest = ? AND served", (digest,)))

    def memory(self, digest: str) -> ServedBundle:
        """The API process's part of a version that is kept or resident."""
        if (memory := self._memories.get(digest)) is not None:
            return memory
        (_, *of_it), *_ = self._read(MEMORY, (digest,))
        return _memory(*of_it)

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

    def users_of_adapter(self, adapter: str) -> list[str]:
        """The names of bundles that need a LoRA adapter, in alphabetical order."""
        statement = (
            "SELECT name FROM versions JOIN contents USING (digest) WHERE served AND metadata ->> 'adapter' = ? "
            "ORDER BY name"
        )
        return [name for (name,) in self._read(statement, (adapter,))]

    def evictable(self) -> set[str]:
        """The versions that have room in the pool and may leave it: no pinned name stands for them."""
        rows = self._read(f"SELECT digest FROM contents WHERE resident_bytes > 0 AND NOT {IS_PINNED}")
        return {digest for (digest,) in rows}

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

    def point(
        self,
        record: VersionRecord,
        memory: ServedBundle,
        resident_bytes: int | None,
        bundle: bytes | None,
        keep: int,
        event: str,
        pin: bool | None = None,
        tag: str | None = None,
    ) -> str | None:
        """Let a name stand for a version; return what it stood for before, if no name does any more.

        Args:
            resident_bytes: in the pool of one rank; None if it was not made resident now.
            bundle: the content of its file, to be kept.
            keep: at most so many versions of the name are kept.
            event: how the audit chain names the change.
            pin: whether the name's versions stay in the pool; None as before.
            tag: what a resolver has said of the file; None for any other name.

        Raises:
            CapacityError, ConfigError: it cannot be recorded. Nothing has changed.
        """
        if bundle is not None and len(bundle) > LARGEST_KEPT:
            raise CapacityError(f"a bundle of {len(bundle)} bytes cannot be kept in the state file: {LARGEST_KEPT} are")
        loaded_at, name = record.loaded_at.isoformat(), record.name
        row = (name, record.digest, record.parent_digest, loaded_at, record.by, record.source)
        metadata = memory.metadata.model_dump_json()
        with self._transaction() as rows:
            before, replaced = _digests(rows, name), _served(rows, name)
            audit_chain.append(rows, event, _details_of(record, replaced))
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
                (name, keep),
            )
            rows.execute(
                "INSERT INTO contents VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET metadata = excluded.metadata, "
                "path = excluded.path, file_bytes = excluded.file_bytes, "
                "resident_bytes = coalesce(excluded.resident_bytes, resident_bytes), "
                "bundle = coalesce(excluded.bundle, bundle)",
                (record.digest, metadata, memory.path, memory.file_bytes, resident_bytes, bundle),
            )
            if pin is not None:
                rows.execute(
                    "INSERT OR IGNORE INTO pins VALUES (?)" if pin else "DELETE FROM pins WHERE name = ?", (name,)
                )
            rows.execute("DELETE FROM tags WHERE name = ?", (name,))
            if tag is not None:
                rows.execute("INSERT INTO tags VALUES (?, ?)", (name, tag))
            rows.execute(
                "DELETE FROM uses WHERE name = ? AND fact NOT IN (SELECT value FROM json_each(?))",
                (name, json.dumps([fact.id for fact in memory.metadata.facts])),
            )
            rows.execute("UPDATE attempts SET left_digest = NULL WHERE name = ?", (name,))
            _drop_unused(rows, before)
            return _unnamed(rows, replaced)

    def drop(self, name: str, who: str) -> str | None:
        """Forget a name; return what it stood for, if no name does any more.

        Raises:
            CapacityError, ConfigError: it cannot be recorded, and nothing has changed.
        """
        with self._transaction() as rows:
            before, served = _digests(rows, name), _served(rows, name)
            audit_chain.append(rows, "unload", {"name": name, "digest": served, "by": who})
            for table in ("versions", "uses", "pins", "tags"):
                rows.execute(f"DELETE FROM {table} WHERE name = ?", (name,))
            rows.execute("UPDATE attempts SET left_digest = ? WHERE name = ?", (served, name))
            _drop_unused(rows, before)
            return _unnamed(rows, served)

    def forget_tag(self, name: str) -> None:
        """What a resolver has found for a name cannot be read any more: it is another file to whoever looks again."""
        with self._transaction(durable=False) as rows:
            rows.execute("UPDATE tags SET tag = '' WHERE name = ?", (name,))

    def warm(self, digest: str, resident_bytes: int) -> None:
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
            CapacityError, ConfigError: it cannot be recorded. Nothing has changed.
        """
        with self._transaction() as rows:
            details = {"name": name, "digests": list(digests), "served": _served(rows, name), "by": who}
            audit_chain.append(rows, "forget", details)
            for digest in digests:
                rows.execute("DELETE FROM versions WHERE name = ? AND digest = ?", (name, digest))
            _drop_unused(rows, digests)
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
            _drop_unused(rows, [digest])
        self._erase_log()
        return was_resident

    def _erase_log(self) -> None:
        """What was deleted is overwritten in the file, and leaves the write-ahead log too, once nobody reads it."""
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            self._durable.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # ---- what the API processes tell each other ------------------------------------------------------------------

    def attempt(self, name: str, *, loading: bool) -> None:
        """A change of a name begins; `loading` if it is a load."""
        with self._transaction(durable=False) as rows:
            rows.execute(
                "INSERT INTO attempts VALUES (?1, ?2, NULL, NULL, NULL, NULL) "
                "ON CONFLICT DO UPDATE SET loading = loading + ?2",
                (name, int(loading)),
            )
            rows.execute(
                "DELETE FROM attempts WHERE loading = 0 AND rowid <= (SELECT max(rowid) - ? FROM attempts)", (ATTEMPTS,)
            )

    def attempted(self, name: str, *, loading: bool, change: str, reason: str | None, says_something: bool) -> None:
        """A change of a name has ended, with a reason if it has failed, which may say nothing of the bundle."""
        now = datetime.now(UTC).isoformat()
        failure = (None, None, None) if reason is None else (change, reason, now)
        with self._transaction(durable=False) as rows:
            rows.execute("UPDATE attempts SET loading = max(loading - ?, 0) WHERE name = ?", (int(loading), name))
            if says_something:
                rows.execute("UPDATE attempts SET change = ?, reason = ?, at = ? WHERE name = ?", (*failure, name))

    def attempt_of(self, name: str) -> Attempt:
        found = self._read("SELECT loading, change, reason, at, left_digest FROM attempts WHERE name = ?", (name,))
        loading, change, reason, at, left = found[0] if found else (0, None, None, None, None)
        return Attempt(loading > 0, change, reason, at and datetime.fromisoformat(at), left)

    def note_uses(self, uses: Mapping[tuple[str, str], float]) -> None:
        """When facts have answered, by name and id, in seconds since the epoch. Names that are gone are left out."""
        with self._transaction(durable=False) as rows:
            rows.executemany(
                "INSERT INTO uses SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT * FROM versions WHERE name = ?1) "
                "ON CONFLICT DO UPDATE SET at = max(at, excluded.at)",
                [(name, fact, at) for (name, fact), at in uses.items()],
            )

    def uses(self, name: str) -> dict[str, float]:
        """When the facts of a name have last answered; those that have not are missing."""
        return dict(self._read("SELECT fact, at FROM uses WHERE name = ?", (name,)))

    def put_trace(self, owner: str, salt: str | None, response: str, trace: dict[str, Any]) -> None:
        """Clients may choose the ids of their requests: a trace is found by its owner alone, and never overwritten."""
        row = (owner, json.dumps(salt), response, trace["digest"], json.dumps(trace))
        with self._transaction(durable=False) as rows:
            rows.execute("INSERT OR IGNORE INTO traces VALUES (?, ?, ?, ?, ?)", row)
            rows.execute("DELETE FROM traces WHERE rowid <= (SELECT max(rowid) - ? FROM traces)", (TRACES,))

    def traces(self, owner: str, salt: str | None, response: str) -> list[dict[str, Any]]:
        """Of one HTTP response: one for each prompt, or for each turn of a response with tool calls.

        vLLM names the engine requests of such a response by its id and a running number.
        """

        def of(request_id: str) -> dict[str, Any] | None:
            found = self._read(
                "SELECT trace FROM traces WHERE owner = ? AND salt = ? AND response = ?",
                (owner, json.dumps(salt), request_id),
            )
            return json.loads(found[0][0]) if found else None

        if (trace := of(response)) is not None:
            return [trace]
        for separator in "-_":
            found: list[dict[str, Any]] = []
            while (trace := of(f"{response}{separator}{len(found)}")) is not None:
                found.append(trace)
            if found:
                return found
        return []

    def _now(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        """As `_read`, for the event loop: it waits for nothing that takes long."""
        with self._watch_lock, _as_config_error(f"{self.path}: cannot be read"):
            return self._watch.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _moment(self) -> Iterator[None]:
        """All that is read within this context is of one moment."""
        with self._read_lock, _as_config_error(f"{self.path}: cannot be read"):
            self._reading.execute("BEGIN")
            try:
                yield
            finally:
                self._reading.execute("COMMIT")

    def _read(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._read_lock, _as_config_error(f"{self.path}: cannot be read"):
            return self._reading.execute(statement, values).fetchall()


def check_state_file(path: Path) -> bool:
    """Whether a state file is there, which is not changed; a missing or an empty file may become one.

    Raises:
        ConfigError: it is something else, or of another version.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: no such folder: {path.parent}")
    if not path.exists():
        return False
    if not path.is_file():
        raise ConfigError(f"{path}: a state file is expected, and this is no file")
    with _as_config_error(f"{path}: cannot be used as a state file"):
        if path.stat().st_size == 0:
            return False
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as found:
            found.execute("BEGIN")  # what is read is of one moment: the first process may begin the file now
            (application,), (version,) = (
                found.execute(f"PRAGMA {field}").fetchone() for field in ("application_id", "user_version")
            )
            (tables,) = found.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if (application, tables) == (0, 0):  # of a server that was killed when it began the file, or begins it now
        return False
    if application != APPLICATION:
        raise ConfigError(f"{path}: a state file is expected, and this is the database of another application")
    if version != FORMAT:
        raise ConfigError(f"{path}: a state file of version {FORMAT} is expected, found version {version}")
    return True


def _memory(metadata: str, path: str, file_bytes: int) -> ServedBundle:
    return ServedBundle(BundleMetadata.model_validate_json(metadata), path, file_bytes)


def _byte_of(digest: str) -> int:
    """Of the lock file, for a version."""
    return VERSIONS + int(digest[:15], 16)


def _served(rows: sqlite3.Connection, name: str) -> str | None:
    """What a name stands for."""
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


def _drop_unused(rows: sqlite3.Connection, digests: Iterable[str]) -> None:
    """Contents that nothing needs go, of these, with their traces."""
    for digest in digests:
        for statement in DROP_UNUSED:
            rows.execute(statement, (digest,))


def _record(row: tuple[str, str, str | None, str, str, str]) -> VersionRecord:
    name, digest, parent, loaded_at, by, source = row
    return VersionRecord(name, digest, parent, datetime.fromisoformat(loaded_at), by, source)


@contextlib.contextmanager
def _as_config_error(problem: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise (CapacityError if full else ConfigError)(f"{problem}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from error
