"""The gate log: whole lines of numbers, from several writers, and a disk that hangs."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from inducekv_vllm.workers import gate_log
from inducekv_vllm.workers.gate_log import GateLog, open_log
from tests.bundles import random_gated_bundle

BUNDLE = random_gated_bundle()
assert BUNDLE.gate is not None
GATE = BUNDLE.gate.token_digest
EVIDENCE = np.array([0.123456, 0, 1, 0.5, 0.00004, 0.2, 0.3, 0.9], np.float32)


def test_a_line_for_each_decision(tmp_path: Path) -> None:
    path = tmp_path / "gate.jsonl"
    path.write_text("from before\n")
    log = GateLog.of(InduceKVConfig(gate_log=str(path)))
    for task in ("a", None):
        log.note(GATE, EVIDENCE, task)
    log.close()
    before, *lines = path.read_text().splitlines()
    assert before == "from before"
    shared = {"gate": GATE, "evidence": [0.1235, 0, 1, 0.5, 0, 0.2, 0.3, 0.9]}
    assert [json.loads(line) for line in lines] == [shared | {"task": "a"}, shared | {"task": None}]


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    os.close(open_log(str(tmp_path / "new")))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_a_log_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, reason in (
        ("fifo", "No such device or address"),
        ("folder", "Is a directory"),
        ("missing/log", "No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: cannot be used as a gate log: {reason}"):
            GateLog(str(tmp_path / name))
    with pytest.raises(ConfigError, match="/dev/null: cannot be used as a gate log: not a regular file"):
        GateLog("/dev/null")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match="not a regular file"):
        GateLog(str(tmp_path / "fifo"))
    os.close(reader)


def test_lines_of_several_writers_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "gate.jsonl"
    logs = [GateLog(str(path)) for _ in range(3)]
    writers = [
        threading.Thread(target=lambda log=log: [log.note(GATE, EVIDENCE, "a") for _ in range(200)])  # type: ignore[misc]
        for log in logs
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for log in logs:
        log.close()
    assert [json.loads(line)["task"] for line in path.read_text().splitlines()] == ["a"] * 600


def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, write = threading.Event(), os.write
    monkeypatch.setattr(gate_log, "MAX_WAITING", 3)
    monkeypatch.setattr(gate_log.os, "write", lambda *arguments: (goes_on.wait(30), write(*arguments))[1])
    errors: list[str] = []
    monkeypatch.setattr(gate_log.logger, "error", lambda message, *values: errors.append(message % values))
    path = tmp_path / "gate.jsonl"
    log = GateLog(str(path))
    for _ in range(6):
        log.note(GATE, EVIDENCE, "a")
    goes_on.set()
    log.close()
    assert len(path.read_text().splitlines()) == 3
    assert errors == [f"{path}: the disk is too slow; lines are left out"]
