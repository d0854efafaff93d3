"""The untouched model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.continual.suites import TaskData

from .method import Artifact, Circumstances


@dataclass(frozen=True)
class NoMemory:
    """Learns nothing."""

    kind: ClassVar[str] = "none"

    name: str = "no_memory"

    def learn(self, task: TaskData, previous: Path | None, out: Path, circumstances: Circumstances) -> Artifact:
        return Artifact("none", None, 0, {})
