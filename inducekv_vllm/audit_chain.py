"""An append-only log of JSON lines in which each record names the SHA-256 of the line before.

    {"n": 0, "time": "...", "event": "start", "previous": "000...0"}
    {"n": 1, "time": "...", "event": "load", ..., "previous": "SHA-256 of the line above, without its newline"}

So no line can be changed, removed or inserted without breaking the chain behind it. Lines can be cut off at the end:
note the last hash (the *head*) elsewhere from time to time, and give it to `verify`.

A process that is killed while it writes leaves a last line without its newline. That record was never acknowledged. The
next process ends the line, and its first record names the line's SHA-256 as "torn", so nothing is ever removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from .errors import ConfigError

NO_RECORD: Final = "0" * 64  # what the first record names as the one before
MAX_LINE_BYTES: Final = 2**22


@dataclass(frozen=True)
class Chain:
    """What `verify` has found in a log that is not broken."""

    records: int
    head: str  # SHA-256 of the last record's line
    torn: int  # bytes of the last line, if it has no end: its writer was killed; 0 otherwise


class AuditWriter:
    """Appends to a log. Any thread may use it; one process at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a log, or begin one that only its owner can read.

        Raises:
            ConfigError: it cannot be opened or is not an ordinary file, another process writes to it, or its last line
                is no record.
        """
        self.path = Path(path)
        self._lock = threading.Lock()
        self._pending = b""  # what could not be written of the last record
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be used as an audit log: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ConfigError(f"{path}: cannot be used as an audit log: it is not an ordinary file")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"{path}: another server writes to this audit log") from error
            self._number, self._previous, self._torn = self._end()
            self._complete_torn()
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        os.close(self._file)

    @property
    def head(self) -> str:
        return self._previous

    def append(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write one record. It is on the disk after the next `sync`.

        Raises:
            ConfigError: it cannot be written.
        """
        with self._lock:
            torn = {} if self._torn is None else {"torn": hashlib.sha256(self._torn).hexdigest()}
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            record = {"n": self._number, "time": now, "event": event, **facts, **torn, "previous": self._previous}
            line = json.dumps(record, ensure_ascii=True, allow_nan=False).encode()
            if len(line) >= MAX_LINE_BYTES:
                raise ConfigError(f"{self.path}: a record of the event {event!r} is too long: {len(line)} bytes")
            try:
                self._flush()
                self._write(line)
            except OSError as error:
                raise ConfigError(f"{self.path}: cannot write the audit log: {error.strerror}") from error

    def sync(self) -> None:
        """Wait until all records are on the disk, without keeping others from writing.

        Raises:
            ConfigError: the disk has failed.
        """
        try:
            os.fsync(self._file)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot write the audit log: {error.strerror}") from error

    def _write(self, line: bytes) -> None:
        """Write a record. Raises OSError: what could be written of it, if anything, is a torn line."""
        before = self._number, self._previous, self._torn
        content = (b"" if self._torn is None else b"\n") + line + b"\n"
        self._pending = content
        self._number, self._previous, self._torn = self._number + 1, hashlib.sha256(line).hexdigest(), None
        try:
            self._flush()
        except OSError:
            written = content[: len(content) - len(self._pending)]
            if not written or (before[2] is None and written != line):
                self._number, self._previous, self._torn = before
                self._torn, self._pending = written or self._torn, b""
            raise  # otherwise there are two torn lines, or all but the newline: the next record completes this one

    def _flush(self) -> None:
        while self._pending:
            self._pending = self._pending[os.write(self._file, self._pending) :]

    def _complete_torn(self) -> None:
        """A line that lacks nothing but its newline is a record, and gets it with the next one."""
        record = None if self._torn is None else _record(self._torn)
        if self._torn and record and (record["n"], record["previous"]) == (self._number, self._previous):
            self._number, self._previous = self._number + 1, hashlib.sha256(self._torn).hexdigest()
            self._torn, self._pending = None, b"\n"

    def _end(self) -> tuple[int, str, bytes | None]:
        """The number of the next record, the hash of the last one, and a line without an end."""
        size = os.fstat(self._file).st_size
        begin = max(0, size - 2 * MAX_LINE_BYTES)
        lines = os.pread(self._file, size - begin, begin).split(b"\n")
        torn = lines.pop() or None
        if not lines and begin == 0:
            return 0, NO_RECORD, torn
        record = _record(lines[-1]) if lines else None
        if record is None:
            raise ConfigError(
                f"{self.path}: its last line is not a record of an audit log; look at it with "
                "`inducekv-bundle audit verify`, and give another file"
            )
        return record["n"] + 1, hashlib.sha256(lines[-1]).hexdigest(), torn


def verify(path: str | os.PathLike[str], head: str | None = None) -> Chain:
    """Check a log from its first line to its last.

    Args:
        head: the SHA-256 of a record that must be in it: the head that an earlier `verify` has found.

    Raises:
        ConfigError: the file cannot be read, a line is broken (the message names the first), or `head` is missing.
    """
    number, previous, seen = 0, NO_RECORD, head in (None, NO_RECORD)
    torn: bytes | None = None  # the line before, which is no record
    problem = ""
    try:
        with Path(path).open("rb") as file:
            for place, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                content = line.removesuffix(b"\n")
                found = problem_of(content, number, previous, torn) if line.endswith(b"\n") else "it has no end"
                if not found:
                    number, previous, torn = number + 1, hashlib.sha256(content).hexdigest(), None
                    seen = seen or previous == head
                elif torn is None:
                    torn, problem = content, f"line {place}: {found}"
                    is_last = not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES
                else:
                    raise ConfigError(f"{path}: {problem}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the audit log: {error.strerror}") from error
    if torn is not None and not is_last:
        raise ConfigError(f"{path}: {problem}")
    if not seen:
        raise ConfigError(f"{path}: no record has the SHA-256 {head}: records were cut off, or this is another log")
    return Chain(number, previous, 0 if torn is None else len(torn))


def problem_of(line: bytes, number: int, previous: str, torn: bytes | None) -> str:
    """Why a line is not the record that follows; empty if it is."""
    record = _record(line)
    if record is None:
        return "it is not a record"
    if record["n"] != number:
        return f"it must have the number {number}, found {record['n']}"
    if record["previous"] != previous:
        return f"it must follow the record of SHA-256 {previous:.16}, found {record['previous']:.16}"
    expected = None if torn is None else hashlib.sha256(torn).hexdigest()
    if record.get("torn") != expected:
        return "the line before it is no record" if torn is not None else "it names a torn line, and there is none"
    return ""


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(record, dict) and type(record.get("n")) is int and isinstance(record.get("previous"), str)
    return record if is_one else None
