"""The chained log: what was changed is found, what was cut short by a kill is told apart, and a restart goes on."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.files.audit_chain import NO_RECORD, AuditWriter, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def write(path: Path, *events: str) -> str:
    """One writer's records; returns the head."""
    writer = AuditWriter(path)
    for event in events:
        writer.append(event, {"name": f"the {event} of \u2028 é"})
    writer.close()
    return writer.head


def test_each_record_names_the_line_before(path: Path) -> None:
    head = write(path, "start", "load")
    first, second = path.read_bytes().splitlines()
    assert json.loads(first)["previous"] == NO_RECORD
    assert json.loads(second)["previous"] == hashlib.sha256(first).hexdigest()
    assert head == hashlib.sha256(second).hexdigest()
    assert [json.loads(line)["n"] for line in (first, second)] == [0, 1]
    assert verify(path) == (2, head, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_restart_goes_on(path: Path) -> None:
    before = write(path, "start", "load")
    head = write(path, "start", "unload")
    assert verify(path, before) == (4, head, 0)


def test_an_empty_log_is_whole(path: Path) -> None:
    path.touch()
    assert verify(path) == (0, NO_RECORD, 0)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_ordinary_file(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(ConfigError, match=r"audit.jsonl: cannot be used as an audit log: (it is not an ord|Is a dir)"):
        AuditWriter(path)


@pytest.mark.parametrize("line", range(4))
def test_the_first_line_that_was_changed_is_named(path: Path, line: int) -> None:
    """Any line but the last: the record behind it names what it was. The last one is what a known head is for."""
    head = write(path, "start", "load", "replace", "unload", "stop")
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (
        [lines[line].replace(b"the ", b"The ")],  # another content
        [],  # removed
        [lines[line], lines[line]],  # twice
        [b"{}\n"],
        [lines[line][:-5] + b"\n"],  # cut off, but with an end
    ):
        path.write_bytes(b"".join([*lines[:line], *changed, *lines[line + 1 :]]))
        with pytest.raises(ConfigError, match=rf"audit.jsonl: line ({line + 1}|{line + 2}): it "):
            verify(path, head)


def test_a_forged_last_record_is_found_by_its_head(path: Path) -> None:
    head = write(path, "start", "load")
    content = path.read_bytes()
    for forged in (content.replace(b"the load", b"the lord"), content.splitlines(keepends=True)[0]):
        path.write_bytes(forged)
        verify(path)
        with pytest.raises(ConfigError, match=f"no record has the SHA-256 {head}: records were cut off"):
            verify(path, head)


def test_every_truncation_is_a_cut_and_the_next_writer_goes_on(path: Path) -> None:
    write(path, "start", "load", "replace")
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        whole = content[:size].count(b"\n")
        torn = size - (content[:size].rfind(b"\n") + 1)
        assert verify(path)[::2] == (whole, torn)
        lacks_its_newline = content[size : size + 1] == b"\n"
        head = write(path, "start")
        assert verify(path) == (whole + 1 + lacks_its_newline, head, 0)
        assert path.read_bytes().startswith(content[:size])  # nothing was removed


def test_a_torn_line_that_was_changed_afterwards_is_found(path: Path) -> None:
    write(path, "start", "load")
    path.write_bytes(path.read_bytes()[:-20])
    write(path, "start")
    verify(path)
    path.write_bytes(path.read_bytes().replace(b"the load", b"the lord"))
    with pytest.raises(ConfigError, match="line 2: it is not a record"):
        verify(path)


def test_two_lines_that_are_no_records(path: Path) -> None:
    write(path, "start", "load", "replace", "unload")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"x\n", b"y\n", *lines[1:]]))
    with pytest.raises(ConfigError, match="line 2: it is not a record"):
        verify(path)


def test_a_file_that_is_no_log_is_not_written_to(path: Path) -> None:
    content = b"something else\n"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"audit.jsonl: its last line is not a record"):
        AuditWriter(path)
    assert path.read_bytes() == content


def test_one_writer_at_a_time(path: Path) -> None:
    writer = AuditWriter(path)
    with pytest.raises(ConfigError, match="another server writes to this audit log"):
        AuditWriter(path)
    writer.close()
    AuditWriter(path).close()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    for path, problem in ((tmp_path, "Is a directory"), (tmp_path / "no" / "log", "No such file")):
        with pytest.raises(ConfigError, match=f"cannot be used as an audit log: {problem}"):
            AuditWriter(path)
        with pytest.raises(ConfigError, match=f"cannot read the audit log: {problem}"):
            verify(path)


@pytest.mark.parametrize(
    ("room", "records"),
    [
        ((0,), 2),  # nothing of the record is there
        ((10,), 2),  # a part, which the next record names
        ((10, 0, 0), 2),
        ((10, 20), 2),  # two parts in a row
        ((10, 0, 20, 5), 2),
    ],
)
def test_records_that_could_be_written_in_part(
    path: Path, monkeypatch: pytest.MonkeyPatch, room: tuple[int, ...], records: int
) -> None:
    """The disk is full in the middle of records, and has room again for the last one."""
    writer = AuditWriter(path)
    writer.append("start", {})
    for each in room:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", _disk(each))
            with pytest.raises(ConfigError, match="cannot write the audit log: No space left"):
                writer.append("load", {})
    writer.append("unload", {})
    assert verify(path) == (records, writer.head, 0)
    assert path.read_bytes().count(b'"unload"') == 1


def _disk(room: int) -> Callable[[int, bytes], int]:
    """`os.write` on a disk with room for so many bytes."""
    real = os.write

    def limited(file: int, content: bytes) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(28, "No space left on device")
        written = real(file, content[:room])
        room -= written
        return written

    return limited


def test_kill_while_it_writes(path: Path) -> None:
    """A process is killed while it appends; whatever it has left, the chain goes on."""
    code = (
        "import sys; from inducekv_vllm.files.audit_chain import AuditWriter\n"
        "writer = AuditWriter(sys.argv[1])\n"
        "for number in range(10**9):\n"
        "    writer.append('answer', {'entries': list(range(200))})\n"
        "    if number == 100: print('go', flush=True)"
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = verify(path)
    assert found[0] > 300
    head = write(path, "start")
    assert verify(path) == (found[0] + 1, head, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have(path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        AuditWriter(path).append("load", {"x": value})
    assert path.read_bytes() == b""
