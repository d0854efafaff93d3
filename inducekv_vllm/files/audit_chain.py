"""A chain of records, in a table of a SQLite file: each names the SHA-256 of the one before as `previous`.

So no record can be changed, removed or inserted without breaking the chain behind it. A server keeps one in its state.
"""

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ..errors import ConfigError

NO_RECORD: Final = "0" * 64  # what the first record names as the one before
TABLE: Final = "CREATE TABLE audit (n INTEGER PRIMARY KEY, record TEXT NOT NULL) STRICT;"


def append(rows: sqlite3.Connection, event: str, details: Mapping[str, Any]) -> None:
    """Add a record within a transaction that may write, so that nobody else adds one meanwhile."""
    number, last = rows.execute("SELECT n, record FROM audit ORDER BY n DESC LIMIT 1").fetchone() or (-1, None)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record = {"n": number + 1, "time": now, "event": event, **details, "previous": digest_of(last)}
    rows.execute("INSERT INTO audit VALUES (?, ?)", (number + 1, json.dumps(record, allow_nan=False)))


def digest_of(record: str | None) -> str:
    return NO_RECORD if record is None else hashlib.sha256(record.encode()).hexdigest()


def verify(path: str | Path, head: str | None = None) -> tuple[int, str]:
    """Check a chain, and that an earlier `head` is in it.

    Returns the number of records and the head, the SHA-256 of the last one.

    Raises:
        ConfigError: the file has no chain, or a record is broken: it names the first one.
    """
    expected, seen, number = NO_RECORD, head in (None, NO_RECORD), -1
    for number, (n, record) in enumerate(read(path)):
        found = _parsed(record)
        if (n, found.get("n"), found.get("previous")) != (number, number, expected):
            raise ConfigError(f"{path}: record {n} of the audit chain does not follow record {number - 1}")
        expected = digest_of(record)
        seen = seen or expected == head
    if not seen:
        raise ConfigError(f"{path}: no record has the SHA-256 {head}: records were cut off, or this is another chain")
    return number + 1, expected


def read(path: str | Path) -> Iterator[tuple[int, str]]:
    """The numbers and records of a chain. Raises ConfigError: the file has none."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file")
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as rows:
            yield from rows.execute("SELECT n, record FROM audit ORDER BY n")
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot read an audit chain: {error}") from error


def _parsed(record: str) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(record)
        if isinstance(found, dict):
            return found
    return {}
