"""The chained log: what was changed is found, what was cut short by a kill is told apart, and a restart goes on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


def test_each_record_names_the_line_before_and_a_restart_goes_on(path: Path) -> None:
    path.touch(0o600)
    assert verify(path) == (0, NO_RECORD, 0)
    head = write(path, "start", "load")
    first, second = path.read_bytes().splitlines()
    assert json.loads(first)["previous"] == NO_RECORD
    assert json.loads(second)["previous"] == hashlib.sha256(first).hexdigest()
    assert head == hashlib.sha256(second).hexdigest()
    assert [json.loads(line)["n"] for line in (first, second)] == [0, 1]
    assert verify(path, write(path, "start", "unload"))[0] == 4
    assert verify(path, head)[0] == 4


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
        [b"x\n", b"y\n", lines[line]],
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


def test_files_that_cannot_be_used(tmp_path: Path, path: Path) -> None:
    (tmp_path / "other").write_bytes(b"something else\n")
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (
        ("", "cannot be used as an audit log: Is a directory"),
        ("pipe", "cannot be used as an audit log: not a regular file"),
        ("no/log", "cannot be used as an audit log: No such file"),
        ("other", "its last line is not a record"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: {problem}"):
            AuditWriter(tmp_path / name)
    assert (tmp_path / "other").read_bytes() == b"something else\n"
    with pytest.raises(ConfigError, match="cannot read the audit log: not a regular file"):
        verify(tmp_path / "pipe")

    writer = AuditWriter(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="JSON compliant"):
        writer.append("load", {"x": float("nan")})
    assert path.read_bytes() == b""


@pytest.mark.parametrize("room", [(0,), (10,), (10, 0, 0), (10, 20), (10, 0, 20, 5)])
def test_records_that_could_be_written_in_part(
    path: Path, monkeypatch: pytest.MonkeyPatch, room: tuple[int, ...]
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
    assert verify(path) == (2, writer.head, 0)
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
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        process.kill()
    records = verify(path)[0]
    assert records > 100
    assert verify(path, write(path, "start"))[0] == records + 1


def test_processes_that_write_by_turns_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    first, second = AuditWriter(path), AuditWriter(path)
    for number in range(4):
        (first, second)[number % 2].append("answer", {"request": number})
    second.append("answer", {"request": 4})
    assert [json.loads(line)["request"] for line in path.read_text().splitlines()] == list(range(5))
    assert verify(path)[0] == 5
