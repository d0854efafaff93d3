"""The state file: opened by all API processes of a server, locked, written in transactions, watched.

Bytes of `FILE.lock` are locked by the server that uses the file, by the process that makes a change, and for each
resident version by the processes whose requests use it, and by the one that lets it leave the pool; a process that is
killed leaves no lock behind.
"""

import contextlib
import fcntl
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from inducekv_vllm.errors import CapacityError, ConfigError, InduceKVError
from inducekv_vllm.files import audit_chain

APPLICATION: Final = 0x494B5653  # "IKVS", in the file's header
FORMAT: Final = 2
BUSY_S: Final = 10.0
WAIT_S: Final = 0.1  # for the first process
SERVER, CHANGE, VERSIONS, LEAVING = 0, 1, 2, 1 << 61  # bytes of the lock file; the first ones of those for versions

SCHEMA: Final = f"""
BEGIN;
CREATE TABLE versions (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, digest TEXT NOT NULL, parent TEXT, loaded_at TEXT NOT NULL,
    by TEXT NOT NULL, source TEXT NOT NULL, served INTEGER NOT NULL, UNIQUE (name, digest)) STRICT;
CREATE TABLE contents (
    digest TEXT PRIMARY KEY, metadata TEXT NOT NULL, path TEXT NOT NULL, file_bytes INTEGER NOT NULL,
    resident_bytes INTEGER, bundle BLOB) STRICT;
CREATE TABLE pins (name TEXT PRIMARY KEY) STRICT;
CREATE TABLE tags (name TEXT PRIMARY KEY, tag TEXT NOT NULL) STRICT;
CREATE TABLE traces (
    owner TEXT NOT NULL, salt TEXT NOT NULL, response TEXT NOT NULL, digest TEXT NOT NULL, trace TEXT NOT NULL,
    UNIQUE (owner, salt, response)) STRICT;
CREATE TABLE uses (name TEXT NOT NULL, fact TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (name, fact)) STRICT;
CREATE TABLE server (run TEXT NOT NULL) STRICT;
CREATE INDEX versions_digest ON versions (digest);
CREATE INDEX contents_resident ON contents (digest) WHERE resident_bytes IS NOT NULL;
{audit_chain.TABLE}
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class StateError(InduceKVError):
    """The state file cannot be read or written while the server runs; nothing has changed."""


class StateFile:
    """See the module docstring. Any thread may call it."""

    def __init__(self, path: str | Path, *, process: int = 0) -> None:
        """Open the file, or begin one that only its owner can read.

        Args:
            process: the number of the server's API process. The first one, 0, begins the file; the others wait for it.

        Raises:
            ConfigError: it is something else, of another version, in use, or cannot be written.
        """
        self.path, self.process = Path(path).absolute(), process
        self._lock, self._read_lock, self._watch_lock = threading.Lock(), threading.RLock(), threading.Lock()
        with as_refusal(ConfigError, f"{self.path}: cannot be used as a state file"):
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
        """Of this open file, not of the process: fcntl(2), "Open file description locks"."""
        fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))

    def begin_change(self) -> bool:
        """Whether this process may make a change now. The lock of a process that is killed ends with it."""
        return self._take(CHANGE)

    def end_change(self) -> None:
        self._lock_byte(fcntl.F_UNLCK, CHANGE)

    def _begin_use(self, digest: str) -> bool:
        """Whether this process may use a version: no other one lets it leave the pool."""
        try:
            self._lock_byte(fcntl.F_RDLCK, VERSIONS + _place(digest))
        except OSError:
            return False
        return True

    def end_hold(self, digest: str) -> None:
        """No request of this process uses a version any more."""
        self._lock_byte(fcntl.F_UNLCK, VERSIONS + _place(digest))

    def begin_leaving(self, digest: str) -> bool:
        """Until `end_leaving` no other process begins to use a version; False if one lets it leave already."""
        return self._take(LEAVING + _place(digest))

    def end_leaving(self, digest: str) -> None:
        self._lock_byte(fcntl.F_UNLCK, LEAVING + _place(digest))

    def is_leaving(self, digest: str) -> bool:
        """Whether another process lets a version leave the pool."""
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LEAVING + _place(digest), 1, 0)
        found, *_ = struct.unpack("hhqqi4x", fcntl.fcntl(self._locks, fcntl.F_OFD_GETLK, asked))
        return bool(found != fcntl.F_UNLCK)

    @contextlib.contextmanager
    def _unused(self, digest: str) -> Iterator[bool]:
        """Whether no other process uses a version, which then none begins to; call it while this one does not."""
        is_unused = self._take(VERSIONS + _place(digest))
        try:
            yield is_unused
        finally:
            if is_unused:
                self.end_hold(digest)

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Raises CapacityError: the disk is full. StateError: it cannot be written. Nothing has changed then.

        What is not durable survives the end of the server, and with the next durable change that of the machine.
        """
        rows = self._durable if durable else self._quick
        with self._lock, as_refusal(StateError, "the state file cannot record this; nothing changed"):
            rows.execute("BEGIN IMMEDIATE")
            try:
                yield rows
                rows.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    rows.execute("ROLLBACK")
                raise

    def change_number(self) -> int:
        """Another one after any change, also of this process. It reads memory that the processes share."""
        with self._watch_lock, as_refusal(StateError, "the state file cannot be read"):
            (number,) = self._watch.execute("PRAGMA data_version").fetchone()
        return int(number)

    def _now(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        """As `_read`, for the event loop: it waits for nothing that takes long."""
        with self._watch_lock, as_refusal(StateError, "the state file cannot be read"):
            return self._watch.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _moment(self) -> Iterator[None]:
        """All that is read within this context is of one moment."""
        with self._read_lock, as_refusal(StateError, "the state file cannot be read"):
            self._reading.execute("BEGIN")
            try:
                yield
            finally:
                self._reading.execute("COMMIT")

    def _read(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._read_lock, as_refusal(StateError, "the state file cannot be read"):
            return self._reading.execute(statement, values).fetchall()

    def _erase_log(self) -> None:
        """What was deleted is overwritten in the file, and leaves the write-ahead log too, once nobody reads it."""
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            self._durable.execute("PRAGMA wal_checkpoint(TRUNCATE)")


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
    with as_refusal(ConfigError, f"{path}: cannot be used as a state file"):
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


def _place(digest: str) -> int:
    """Of the bytes of the lock file for a version."""
    return int(digest[:15], 16)


@contextlib.contextmanager
def as_refusal(kind: type[InduceKVError], problem: str) -> Iterator[None]:
    """Raises `kind`, or CapacityError: the disk is full."""
    try:
        yield
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise (CapacityError if full else kind)(f"{problem}: {error}") from error
    except OSError as error:
        raise kind(f"{problem}: {error.strerror}") from error
