"""Runs of one method and budget together, over their seeds."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.continual.results import FinishedRun

Group = list[FinishedRun]


def grouped(runs: Sequence[FinishedRun], seeds: Sequence[int] | None = None) -> dict[tuple[str, int], Group]:
    """By method and budget, in the order of the runs; of `seeds` alone, or all."""
    groups: dict[tuple[str, int], Group] = {}
    for run in runs:
        if seeds is None or run.seed in seeds:
            groups.setdefault((run.method, run.budget), []).append(run)
    return groups
