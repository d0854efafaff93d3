"""The untouched model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.continual.suites import TaskData


@dataclass(frozen=True)
class NoMemory:
    """Learns nothing."""

    kind: ClassVar[Kind] = "none"
    name: str = "no_memory"

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        return Artifact("none", None, 0, {})
