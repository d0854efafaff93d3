"""How long the trainings of a task may take, said before the first of them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Final

from inducekv_vllm.errors import BundleError, TaskDataError

from ..runtime.progress import note
from .settings import RefinedSettings
from .training import Training, TrainingProblem

TIMED_RATE: Final = 0.1  # of steps that are not kept


def announce(problems: Sequence[TrainingProblem], settings: RefinedSettings, trainings_each: int, shown: bool) -> None:
    """Say how many trainings there are at most, and how long they take: two steps of each are timed."""
    if not (shown and settings.steps):
        return
    seconds = settings.steps * trainings_each * sum(seconds_of_step(problem, settings) for problem in problems)
    trainings = trainings_each * len(problems)
    count = "one training" if trainings == 1 else f"at most {trainings} trainings"
    sooner = "; less if they end early" if settings.patience is not None else ""
    note(f"{count} of {settings.steps} steps, about {in_words(seconds)} in {settings.precision}{sooner}")


def seconds_of_step(problem: TrainingProblem, settings: RefinedSettings) -> float:
    """Of the second of two equal steps: the first one also computes what later steps find in the caches."""
    seconds = 0.0
    for _ in range(2):
        training, began = Training(problem, settings, TIMED_RATE), time.perf_counter()
        with contextlib.suppress(TaskDataError, BundleError):  # the training itself will say so
            training.take_step()
        seconds = time.perf_counter() - began
    return seconds


def in_words(seconds: float) -> str:
    """A duration for people, rounded up."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
