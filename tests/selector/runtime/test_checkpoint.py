"""What is left of a run that fails."""

from __future__ import annotations

from pathlib import Path

import torch

from selector.runtime.checkpoint import Checkpoint


def test_a_failed_run_keeps_its_progress_and_no_empty_folder(tmp_path: Path) -> None:
    checkpoint, _ = Checkpoint.open(tmp_path / "run", {})
    checkpoint.write("state", {"x": torch.ones(1)}, {})
    checkpoint.remove_unless_begun()
    assert Checkpoint.open(tmp_path / "run", {}) == (checkpoint, True)
    other, resumed = Checkpoint.open(tmp_path / "other", {})
    other.remove_unless_begun()
    assert not resumed
    assert not other.folder.exists()
