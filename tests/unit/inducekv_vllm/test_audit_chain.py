"""The chain of records: what was changed is found."""

import contextlib
import hashlib
import json
import sqlite3
from pathlib import Path

import pytest

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.files.audit_chain import NO_RECORD, TABLE, append, read, verify

EVENTS = ("start", "load", "replace", "unload", "stop")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    change(path, TABLE)
    return path


def change(path: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(path)) as rows, rows:
        rows.execute(statement, values)


def write(path: Path, *events: str) -> str:
    """Returns the head."""
    with contextlib.closing(sqlite3.connect(path)) as rows, rows:
        for event in events:
            append(rows, event, {"name": f"the {event} of \u2028 é"})
    return verify(path)[1]


def test_each_record_names_the_one_before_and_a_restart_goes_on(path: Path) -> None:
    assert verify(path) == (0, NO_RECORD)
    head = write(path, "start", "load")
    (_, first), (_, second) = read(path)
    assert json.loads(first)["previous"] == NO_RECORD
    assert json.loads(second)["previous"] == hashlib.sha256(first.encode()).hexdigest()
    assert head == hashlib.sha256(second.encode()).hexdigest()
    assert [json.loads(record)["n"] for record in (first, second)] == [0, 1]
    assert verify(path, write(path, "start", "unload"))[0] == 4
    assert verify(path, head)[0] == 4


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET record = replace(record, 'the ', 'The ') WHERE n = ?",
        "UPDATE audit SET record = '{}' WHERE n = ?",
        "UPDATE audit SET record = 'x' WHERE n = ?",
        "UPDATE audit SET record = (SELECT record FROM audit WHERE n = ?1 + 1) WHERE n = ?1",
        "DELETE FROM audit WHERE n = ?",
        "UPDATE audit SET n = n + 10 WHERE n >= ?",
        "UPDATE audit SET n = n - 10 WHERE n <= ?",
    ],
)
def test_the_first_record_that_was_changed_is_named(path: Path, number: int, statement: str) -> None:
    """Any but the last: the record behind it names what it was. The last one is what a known head is for."""
    write(path, *EVENTS)
    change(path, statement, number)
    with pytest.raises(ConfigError, match=r"state: record -?\d+ of the audit chain does not follow record"):
        verify(path)


def test_a_forged_last_record_is_found_by_its_head(path: Path) -> None:
    head = write(path, "start", "load")
    for statement in ("UPDATE audit SET record = replace(record, 'load', 'lord')", "DELETE FROM audit WHERE n = 1"):
        change(path, statement)
        verify(path)
        with pytest.raises(ConfigError, match=f"no record has the SHA-256 {head}: records were cut off"):
            verify(path, head)


def test_files_that_have_no_chain(tmp_path: Path, path: Path) -> None:
    (tmp_path / "other").write_bytes(b"something else\n" * 100)
    change(tmp_path / "stranger", "CREATE TABLE t (x)")
    for name, problem in (
        ("", "no such file"),
        ("none", "no such file"),
        ("other", "cannot read an audit chain: file is not a database"),
        ("stranger", "cannot read an audit chain: no such table: audit"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: {problem}"):
            verify(tmp_path / name)
    with contextlib.closing(sqlite3.connect(path)) as rows, pytest.raises(ValueError, match="JSON compliant"):
        append(rows, "load", {"x": float("nan")})
    assert verify(path)[0] == 0
