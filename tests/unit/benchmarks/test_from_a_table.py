"""`benchmarks.from_a_table`: every method learns the rows and is asked, with fewer steps than in a measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import from_a_table
from benchmarks.continual.suites import Suite
from tests.unit.selector.conftest import record, write_task

FEW = {"steps": 2, "batch_size": 4, "payload_tokens": 2, "learning_rate": 0.1}


def test_every_method_is_taught_and_asked(
    model: Path, suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(from_a_table, "LORA", replace(from_a_table.LORA, steps=2, rank=2))
    monkeypatch.setattr(from_a_table, "MAX_TOKENS", 2)
    few = {"untouched": from_a_table.untouched, "memory": from_a_table.by_memory(FEW), "LoRA": from_a_table.by_lora}
    monkeypatch.setattr(from_a_table, "METHODS", few)
    base = write_task(tmp_path / "base", [record(number, task="base") for number in range(3)])
    arguments = ["--model", str(model), "--base", str(base), "--results", str(tmp_path / "found.json")]
    monkeypatch.setattr("sys.argv", ["from_a_table", *arguments])
    assert from_a_table.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["rows"], result["questions"], result["base"]) == (80, 24, 3)
    found = result["methods"]
    assert list(found) == list(few)
    assert found["untouched"]["bytes"] == 0
    assert all(each["bytes"] > 0 for name, each in found.items() if name != "untouched")
    assert {key for each in found.values() for key in each} == {"seconds", "bytes", "right", "base_right"}
    written = json.loads((tmp_path / "found.json").read_text())
    assert written.pop("machine")
    assert written == result
