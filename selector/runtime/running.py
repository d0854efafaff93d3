"""How a training goes along: where its progress is kept, and who is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .callback import Callback
from .checkpoint import Checkpoint


@dataclass(frozen=True)
class Run:
    checkpoint: Checkpoint | None = None  # None: no progress is kept
    progress: bool = False  # whether it is shown on standard error
    callbacks: Sequence[Callback] = ()  # are told of each step and of the end


ALONE: Final = Run()
