"""Time and memory of a run's phases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selector.runtime import phases as module
from selector.runtime.checkpoint import Checkpoint
from selector.runtime.phases import Phases


def test_a_resumed_run_counts_the_time_of_the_process_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the last progress that it wrote."""
    now = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    checkpoint, _ = Checkpoint.open(tmp_path / "run", {})
    phases = Phases(checkpoint)
    with phases.phase("extract"):
        now += 5
    with phases.phase("refine"):
        now += 1000
        checkpoint.write("state", {"x": torch.ones(1)}, {})
        now += 1  # after which it is killed

    resumed = Phases(Checkpoint.open(tmp_path / "run", {})[0])
    for name, seconds in (("extract", 4), ("refine", 34), ("measure", 2)):
        with resumed.phase(name):
            now += seconds
    assert {r["name"]: r["seconds"] for r in resumed.records} == {"extract": 9, "refine": 1034, "measure": 2}


def test_a_phase_has_its_own_peak_where_the_system_permits_it() -> None:
    """A phase that takes 256 MiB, and one after it that takes nothing."""
    phases = Phases()
    with phases.phase("large"):
        torch.ones(2**26)
    with phases.phase("small"):
        pass
    large, small = phases.records
    assert large["peak_of"] == small["peak_of"]
    if large["peak_of"] == "phase":
        assert large["peak_bytes"] > small["peak_bytes"] + 2**27
    else:
        assert large["peak_bytes"] == small["peak_bytes"]
