"""How long the search for a task's training may take, said before its first step."""

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Final

from inducekv_vllm.errors import BundleError, TaskDataError

from ..runtime.progress import note
from .training import Training, TrainingProblem, TrainingSettings

TIMED_RATE: Final = 0.1  # of steps that are not kept


def announce(trainings: Sequence[Training], rungs: Sequence[tuple[float, int]], shown: bool) -> None:
    """Say how many trainings are begun, and how long all takes at most: two steps of each problem are timed.

    Args:
        rungs: after this share of the steps, so many trainings go on.
    """
    settings = trainings[0].settings
    if not (shown and settings.steps):
        return
    seconds = seconds_of_search(trainings, rungs)
    count = "one training" if len(trainings) == 1 else f"the best of {len(trainings)} trainings"
    sooner = "; less if it ends early" if settings.patience is not None else ""
    note(f"{count} of {settings.steps} steps, at most {in_words(seconds)} in {settings.precision}{sooner}")


def seconds_of_search(trainings: Sequence[Training], rungs: Sequence[tuple[float, int]]) -> float:
    """At most, by two timed steps of each problem; arguments as in `announce`."""
    settings = trainings[0].settings
    problems = {id(each.problem): each.problem for each in trainings}
    of_step = {key: seconds_of_step(problem, settings) for key, problem in problems.items()}
    slowest_first = sorted((of_step[id(each.problem)] for each in trainings), reverse=True)
    shares = shares_of_steps(len(trainings), rungs)
    return settings.steps * sum(share * step for share, step in zip(shares, slowest_first, strict=True))


def shares_of_steps(trainings: int, rungs: Sequence[tuple[float, int]]) -> list[float]:
    """Which share of its steps each training takes, the one that is finished first."""
    shares = [1.0] * trainings
    for share, kept in reversed(rungs):
        shares[kept:] = [share] * (trainings - kept)
    return shares


def seconds_of_step(problem: TrainingProblem, settings: TrainingSettings) -> float:
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
