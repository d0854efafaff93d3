"""The state of a server, in one SQLite file that all of its API processes share.

    versions    what each name stands for, the newest row first, and what it stood for before
    contents    each version's metadata, and its bundle, if the state outlives the server
    draining    what no name stands for any more, by the API processes whose requests may still use it
    attempts    which names are being loaded, and how the last change of each has failed
    traces      what recent responses were answered with, by whom they belong to
    uses        when the facts of a name have last answered, to the minute
    audit       every change, and if asked for every answer, chained

Draining, attempts and traces are of the running server. A change is one transaction with its record in the audit chain,
and on the disk before it is acknowledged: a server that was killed at any moment serves, when it starts again, the last
acknowledged version or the one that it was about to acknowledge. `FILE.lock` is held by the server that uses the file,
and by the process that makes a change.
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
from inducekv_vllm.engine.memory import Memory
from inducekv_vllm.errors import CapacityError, ConfigError
from inducekv_vllm.files import audit_chain

APPLICATION: Final = 0x494B5653  # "IKVS", in the file's header
FORMAT: Final = 1
LARGEST_KEPT: Final = 10**9  # bytes of a bundle: SQLite's limit
TRACES: Final = 1024
ATTEMPTS: Final = 256
BUSY_S: Final = 10.0
WAIT_S: Final = 0.1  # for the first process
SERVER, CHANGE = 0, 1  # bytes of the lock file

SCHEMA: Final = f"""
BEGIN;
CREATE TABLE versions (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, digest TEXT NOT NULL, parent TEXT, loaded_at TEXT NOT NULL,
    by TEXT NOT NULL, source TEXT NOT NULL, served INTEGER NOT NULL, UNIQUE (name, digest)) STRICT;
CREATE TABLE contents (
    digest TEXT PRIMARY KEY, metadata TEXT NOT NULL, path TEXT NOT NULL, file_bytes INTEGER NOT NULL,
    resident_bytes INTEGER, bundle BLOB) STRICT;
CREATE TABLE draining (digest TEXT NOT NULL, process INTEGER NOT NULL, PRIMARY KEY (digest, process)) STRICT;
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
USES: Final = """
CREATE TABLE IF NOT EXISTS uses (
    name TEXT NOT NULL, fact TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (name, fact)) STRICT
"""
DROP_UNUSED: Final = (
    "DELETE FROM contents WHERE resident_bytes IS NULL AND digest NOT IN (SELECT digest FROM versions)",
    "DELETE FROM traces WHERE digest NOT IN (SELECT digest FROM contents)",
)
RECORD: Final = "name, digest, parent, loaded_at, by, source"
SERVED: Final = "SELECT digest FROM versions WHERE served"


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
class Snapshot:
    """What is served, at one moment."""

    versions: dict[str, tuple[VersionRecord, ...]]  # of each name that is served, the newest first
    contents: dict[str, tuple[Memory, int]]  # of what is resident: with its bytes in the pool of one rank
    draining: frozenset[str]  # of these, what this process has not left


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
        self._lock = threading.Lock()
        self._memories: dict[str, Memory] = {}  # by digest
        with _told(f"{self.path}: cannot be used as a state file"):
            while not check_state_file(self.path) and process:
                time.sleep(WAIT_S)
            self._locks = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not process and not self._take(SERVER):
                raise ConfigError(f"{self.path}: another server uses this state file")
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._writer, self._quick, self._reader = (self._connect() for _ in range(3))
            self._quick.execute("PRAGMA synchronous = NORMAL")  # the operating system has it, the disk may not
            if self._writer.execute("PRAGMA application_id").fetchone() == (0,):
                self._writer.executescript(SCHEMA)
            self._writer.execute(USES)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def close(self) -> None:
        """Let another server use the file."""
        with self._lock:
            for connection in (self._writer, self._quick, self._reader):
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

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Raises CapacityError: the disk is full. ConfigError: it cannot be written. Nothing has changed then.

        What is not durable survives the end of the server, and with the next durable change that of the machine.
        """
        rows = self._writer if durable else self._quick
        with self._lock, _told(f"{self.path}: cannot record this; nothing changed"):
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
            for statement in ("draining", "attempts", "traces", "server"):
                rows.execute(f"DELETE FROM {statement}")
            rows.execute("UPDATE contents SET resident_bytes = NULL")
            rows.execute("UPDATE versions SET served = FALSE")
            for statement in DROP_UNUSED:
                rows.execute(statement)

    def begun(self, run: str) -> None:
        """The server of this run has loaded what it begins with."""
        with self._transaction() as rows:
            rows.execute("INSERT INTO server VALUES (?)", (run,))

    def has_begun(self, run: str) -> bool:
        return bool(self._read("SELECT 1 FROM server WHERE run = ?", (run,)))

    def change_number(self) -> int:
        """Another one after any change, also of this process. It reads memory that the processes share."""
        with _told(f"{self.path}: cannot be read"):
            (number,) = self._reader.execute("PRAGMA data_version").fetchone()
        return int(number)

    def snapshot(self) -> Snapshot:
        with self._lock, _told(f"{self.path}: cannot be read"):
            self._writer.execute("BEGIN")
            try:
                versions: dict[str, list[VersionRecord]] = {}
                for row in self._writer.execute(f"SELECT {RECORD} FROM versions ORDER BY number DESC"):
                    versions.setdefault(row[0], []).append(_record(row))
                served = {name for (name,) in self._writer.execute("SELECT name FROM versions WHERE served")}
                resident = self._writer.execute(
                    "SELECT digest, metadata, path, file_bytes, resident_bytes FROM contents "
                    "WHERE resident_bytes IS NOT NULL"
                ).fetchall()
                own = self._writer.execute("SELECT digest FROM draining WHERE process = ?", (self.process,))
                draining = {digest for (digest,) in own}
            finally:
                self._writer.execute("COMMIT")
            contents = {digest: (self._memory(digest, *row), nbytes) for digest, *row, nbytes in resident}
            self._memories = {digest: memory for digest, (memory, _) in contents.items()}
            records = {name: tuple(each) for name, each in versions.items() if name in served}
            return Snapshot(records, contents, frozenset(draining & contents.keys()))

    def _memory(self, digest: str, metadata: str, path: str, file_bytes: int) -> Memory:
        if digest in self._memories:
            return self._memories[digest]
        return Memory(BundleMetadata.model_validate_json(metadata), path, file_bytes)

    def records(self, name: str) -> tuple[VersionRecord, ...]:
        """The versions of a name, served or not, the newest first."""
        rows = self._read(f"SELECT {RECORD} FROM versions WHERE name = ? ORDER BY number DESC", (name,))
        return tuple(_record(row) for row in rows)

    @property
    def names(self) -> list[str]:
        return [name for (name,) in self._read("SELECT name FROM versions GROUP BY name ORDER BY min(number)")]

    def kept(self, digest: str) -> tuple[str, bytes | None]:
        """Where a version was loaded from, and its bundle, if that is kept."""
        ((path, bundle),) = self._read("SELECT path, bundle FROM contents WHERE digest = ?", (digest,))
        return path, bundle

    def point(
        self,
        record: VersionRecord,
        memory: Memory,
        resident_bytes: int,
        bundle: bytes | None,
        keep: int,
        processes: Iterable[int],
        event: str,
    ) -> None:
        """Let a name stand for a version that is resident. At most `keep` versions of it are kept.

        Args:
            bundle: the content of its file, to be kept.
            processes: the API processes of the server, whose requests may use the version before.
            event: how the audit chain names the change.

        Raises:
            CapacityError, ConfigError: it cannot be recorded. Nothing has changed.
        """
        if bundle is not None and len(bundle) > LARGEST_KEPT:
            raise CapacityError(f"a bundle of {len(bundle)} bytes cannot be kept in the state file: {LARGEST_KEPT} are")
        loaded_at = record.loaded_at.isoformat()
        row = (record.name, record.digest, record.parent_digest, loaded_at, record.by, record.source)
        metadata = memory.metadata.model_dump_json()
        with self._transaction() as rows:
            before, replaced = _served(rows), _served(rows, record.name)
            audit_chain.append(rows, event, _details(record, next(iter(replaced), None)))
            newest = rows.execute(
                "SELECT digest, source FROM versions WHERE name = ? ORDER BY number DESC LIMIT 1", (record.name,)
            ).fetchone()
            if newest != (record.digest, record.source):
                rows.execute("DELETE FROM versions WHERE name = ? AND digest = ?", row[:2])
                (number,) = rows.execute("SELECT coalesce(max(number), 0) + 1 FROM versions").fetchone()
                rows.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, FALSE)", (number, *row))
            rows.execute("UPDATE versions SET served = (digest = ?) WHERE name = ?", (record.digest, record.name))
            rows.execute(
                "DELETE FROM versions WHERE name = ?1 AND number NOT IN "
                "(SELECT number FROM versions WHERE name = ?1 ORDER BY number DESC LIMIT ?2)",
                (record.name, keep),
            )
            rows.execute(
                "INSERT INTO contents VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET metadata = excluded.metadata, "
                "path = excluded.path, file_bytes = excluded.file_bytes, resident_bytes = excluded.resident_bytes, "
                "bundle = coalesce(excluded.bundle, bundle)",
                (record.digest, metadata, memory.path, memory.file_bytes, resident_bytes, bundle),
            )
            rows.execute("DELETE FROM draining WHERE digest = ?", (record.digest,))
            rows.execute(
                "DELETE FROM uses WHERE name = ? AND fact NOT IN (SELECT value FROM json_each(?))",
                (record.name, json.dumps([fact.id for fact in memory.metadata.facts])),
            )
            rows.execute("UPDATE attempts SET left_digest = NULL WHERE name = ?", (record.name,))
            _drain(rows, before, processes)

    def drop(self, name: str, processes: Iterable[int], who: str) -> None:
        """Forget a name. Raises CapacityError, ConfigError: it cannot be recorded, and nothing has changed."""
        with self._transaction() as rows:
            before = _served(rows)
            (served,) = rows.execute(
                "SELECT digest FROM versions WHERE name = ? ORDER BY number DESC", (name,)
            ).fetchone()
            audit_chain.append(rows, "unload", {"name": name, "digest": served, "by": who})
            rows.execute("DELETE FROM versions WHERE name = ?", (name,))
            rows.execute("DELETE FROM uses WHERE name = ?", (name,))
            rows.execute("UPDATE attempts SET left_digest = ? WHERE name = ?", (served, name))
            _drain(rows, before, processes)

    def forget(self, name: str, digests: Collection[str], who: str) -> list[str]:
        """Drop earlier versions of a name; return those that are still used or kept otherwise.

        Raises:
            CapacityError, ConfigError: it cannot be recorded. Nothing has changed.
        """
        with self._transaction() as rows:
            details = {"name": name, "digests": list(digests), "served": next(iter(_served(rows, name))), "by": who}
            audit_chain.append(rows, "forget", details)
            for digest in digests:
                rows.execute("DELETE FROM versions WHERE name = ? AND digest = ?", (name, digest))
            for statement in DROP_UNUSED:
                rows.execute(statement)
            in_use = [
                digest
                for digest in digests
                if rows.execute("SELECT 1 FROM contents WHERE digest = ?", (digest,)).fetchone()
            ]
        self._erase_log()
        return in_use

    def leave(self, digest: str) -> bool:
        """No request of this process uses a version that drains; return whether none of any process does."""
        with self._transaction() as rows:
            rows.execute("DELETE FROM draining WHERE digest = ? AND process = ?", (digest, self.process))
            return rows.execute("SELECT 1 FROM draining WHERE digest = ?", (digest,)).fetchone() is None

    def release(self, digest: str) -> bool:
        """Whether nothing uses a resident version any more; it is not resident from now on."""
        with self._transaction() as rows:
            used = f"SELECT 1 FROM draining WHERE digest = ?1 UNION SELECT 1 FROM ({SERVED}) WHERE digest = ?1"
            if rows.execute(used, (digest,)).fetchone() is not None:
                return False
            statement = "UPDATE contents SET resident_bytes = NULL WHERE digest = ? AND resident_bytes IS NOT NULL"
            was_resident = rows.execute(statement, (digest,)).rowcount == 1
            for statement in DROP_UNUSED:
                rows.execute(statement)
        self._erase_log()
        return was_resident

    def _erase_log(self) -> None:
        """What was deleted is overwritten in the file, and leaves the write-ahead log too, once nobody reads it."""
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # ---- what the API processes tell each other ------------------------------------------------------------------

    def attempt(self, name: str, *, loading: bool) -> None:
        """A change of a name begins; `loading` if it is a load."""
        with self._transaction() as rows:
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
        with self._transaction() as rows:
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

    def _read(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._lock, _told(f"{self.path}: cannot be read"):
            return self._writer.execute(statement, values).fetchall()


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
    with _told(f"{path}: cannot be used as a state file"):
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


def _served(rows: sqlite3.Connection, name: str | None = None) -> set[str]:
    """What all names stand for, or one."""
    return {digest for (digest,) in rows.execute(f"{SERVED} AND coalesce(name = ?, TRUE)", (name,))}


def _details(record: VersionRecord, before: str | None) -> dict[str, Any]:
    details = {"name": record.name, "digest": record.digest, "parent": record.parent_digest, "before": before}
    return {**details, "by": record.by, "source": record.source}


def _drain(rows: sqlite3.Connection, before: set[str], processes: Iterable[int]) -> None:
    """Versions that no name stands for any more drain; contents that nothing needs go."""
    leaving = before - _served(rows)
    rows.executemany(
        "INSERT OR IGNORE INTO draining SELECT ?1, ?2 FROM contents WHERE digest = ?1 AND resident_bytes IS NOT NULL",
        [(digest, process) for digest in leaving for process in processes],
    )
    for statement in DROP_UNUSED:
        rows.execute(statement)


def _record(row: tuple[str, str, str | None, str, str, str]) -> VersionRecord:
    name, digest, parent, loaded_at, by, source = row
    return VersionRecord(name, digest, parent, datetime.fromisoformat(loaded_at), by, source)


@contextlib.contextmanager
def _told(problem: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise (CapacityError if full else ConfigError)(f"{problem}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from error
