"""What `inducekv-select --dry-run` says about a hybrid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selector.backbone import tails
from selector.cli.select import main as select
from tests.tiny_hybrids import save_lfm2

LINE = "steps: compute whole prompts"


@pytest.mark.parametrize("most_bytes", [tails.MAX_STATE_BYTES, 100])
def test_states_that_are_not_kept_are_named(
    most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tails, "MAX_STATE_BYTES", most_bytes)
    model, task = save_lfm2(tmp_path / "model"), tmp_path / "keys.jsonl"
    rows = [{"prompt": f"Which key opens chest {number}?", "answer": f"key {number}"} for number in range(12)]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "keys.safetensors"
    few = ["--payload-tokens", "2", "--map-rank", "1", "--activation", "generation", "--batch-size", "2"]
    assert select(["--model", str(model), "--task", str(task), "--output", str(output), "--dry-run", *few]) == 0
    assert (LINE in capsys.readouterr().out) == (most_bytes == 100)
    assert not output.exists()
