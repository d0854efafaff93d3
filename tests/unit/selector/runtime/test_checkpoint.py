"""What a run keeps: its progress, if it fails, and when it began."""

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import torch

from selector.runtime.checkpoint import Checkpoint


def test_a_copied_run_began_when_it_did(tmp_path: Path) -> None:
    """A copy's files are newer, and the date is part of the bundle's digest."""
    before = datetime.now(UTC).replace(microsecond=0)
    checkpoint, _ = Checkpoint.open(tmp_path / "run", {"task": "a"})
    assert before <= checkpoint.began <= datetime.now(UTC)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for file in (tmp_path / "copy").iterdir():
        os.utime(file, (2e9, 2e9))
    copy, resumed = Checkpoint.open(tmp_path / "copy", {"task": "a"})
    assert resumed
    assert copy.began == checkpoint.began


def test_another_runs_progress_is_removed(tmp_path: Path) -> None:
    for number, content in enumerate((b"{", b"[]", b'{"task": "a"}', b'{"began": "soon", "identity": {}}')):
        folder = tmp_path / str(number)
        Checkpoint.open(folder, {"task": "a"})[0].write("state", {"x": torch.ones(1)}, {})
        (folder / "identity.json").write_bytes(content)
        checkpoint, resumed = Checkpoint.open(folder, {"task": "a"})
        assert not resumed
        assert checkpoint.read("state") is None
