"""An append-only log of JSON lines, the records, in which each names the SHA-256 of the line before as `previous`.

So no line can be changed, removed or inserted without breaking the chain behind it. A line without an end, of a writer
that was killed or whose disk was full, stays: the next record names the SHA-256 of the record before and that line.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ..errors import ConfigError
from .regular import open_regular

NO_RECORD: Final = "0" * 64  # what the first record names as the one before
TAIL_BYTES: Final = 2**23  # of a log that are read to go on with it


class AuditWriter:
    """Appends to a log: one thread of each process at a time; any thread may `sync`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a log, or begin one that only its owner can read. Raises ConfigError: it cannot be used."""
        self.path = Path(path)
        with _told(f"{path}: cannot be used as an audit log"):
            self._file = open(path, "ab+", buffering=0, opener=open_regular)  # noqa: SIM115
            self.close = self._file.close
            self._end = -1  # where this process found the end of the log last
            with self._alone():
                pass

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process writes, and behind what others have written."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if self._end != os.fstat(self._file.fileno()).st_size:
                self._find_end()
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _find_end(self) -> None:
        self._end = os.fstat(self._file.fileno()).st_size
        begin = max(0, self._end - TAIL_BYTES)
        lines = os.pread(self._file.fileno(), TAIL_BYTES, begin).split(b"\n")
        at = next((at for at in reversed(range(len(lines))) if _record(lines[at])), 0)
        if not (last := _record(lines[at])) and (len(lines) > 1 or begin):
            raise ConfigError(f"{self.path}: its last line is not a record of an audit log; give another file")
        self._number: int = last["n"] + 1 if last else 0
        self._gap = b"\n" if lines[-1] else b""
        end = b"\n".join(lines[at:]).removesuffix(b"\n")
        self.head = hashlib.sha256(end).hexdigest() if end else NO_RECORD

    def append(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write one record. It is on the disk after the next `sync`. Raises ConfigError: it cannot be written."""
        with _told(f"{self.path}: cannot write the audit log"), self._alone():
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            record = {"n": self._number, "time": now, "event": event, **facts, "previous": self.head}
            line = json.dumps(record, allow_nan=False).encode()
            left = self._gap + line + b"\n"
            try:
                while left:
                    left = left[os.write(self._file.fileno(), left) :]
                self._number, self.head, self._gap = self._number + 1, hashlib.sha256(line).hexdigest(), b""
                self._end = os.fstat(self._file.fileno()).st_size
            except OSError:
                self._find_end()
                raise

    def sync(self) -> None:
        """Wait until all records are on the disk, without keeping others from writing. Raises ConfigError."""
        with _told(f"{self.path}: cannot write the audit log"):
            os.fsync(self._file.fileno())


def verify(path: str | os.PathLike[str], head: str | None = None) -> tuple[int, str, int]:
    """Check a log, and that an earlier `head` is in it. Raises ConfigError: it names the first broken line.

    Returns the number of records, the head (the SHA-256 of the last one), and the bytes of a line without an end.
    """
    number, last, torn, expected, seen, broken = 0, NO_RECORD, 0, NO_RECORD, head in (None, NO_RECORD), ""
    with _told(f"{path}: cannot read the audit log"), os.fdopen(open_regular(path), "rb") as file:
        sha = hashlib.sha256()
        for place, line in enumerate(file, 1):
            content, record = line.removesuffix(b"\n"), _record(line)
            if record and content != line and (record["n"], record["previous"]) == (number, expected):
                sha = hashlib.sha256(content)
                number, last, torn, broken = number + 1, sha.hexdigest(), 0, ""
                seen = seen or last == head
            else:
                torn = 0 if broken or content != line else len(line)
                broken = (
                    broken or f"line {place}: it {f'must follow record {number - 1}' if record else 'is not a record'}"
                )
                sha.update(b"\n" * (place > 1) + content)
            expected = sha.hexdigest()
    if broken and not torn:
        raise ConfigError(f"{path}: {broken}")
    if not seen:
        raise ConfigError(f"{path}: no record has the SHA-256 {head}: records were cut off, or this is another log")
    return number, last, torn


@contextmanager
def _told(problem: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from error


def _record(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and type(record.get("n")) is int and isinstance(record.get("previous"), str):
            return record
    return None
