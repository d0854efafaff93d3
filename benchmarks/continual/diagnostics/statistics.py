"""Statistics that several diagnostics share: spreads, paired differences, correlations, fronts, groups of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from benchmarks.continual.comparison import paired
from benchmarks.continual.metrics import standard_error
from benchmarks.continual.results import WHERE, FinishedRun
from inducekv_vllm.errors import ConfigError

MIN_PAIRS = 3  # for a correlation

Group = list[FinishedRun]
Point = tuple[float, float]


def describe_runs(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Of one method and budget: what most diagnostics' JSON values begin with."""
    return {"method": runs[0].method, "budget": runs[0].budget, "seeds": [run.seed for run in runs]}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (n - 1) and standard error of the mean; a single value has neither of the two."""
    several = len(values) > 1
    return {
        "mean": statistics.mean(values),
        "standard_deviation": statistics.stdev(values) if several else None,
        "standard_error": standard_error(values) if several else None,
    }


def mean_and_error(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard error (NaN for a single value); both None for no value."""
    if not values:
        return {"mean": None, "standard_error": None}
    return {"mean": float(np.mean(values)), "standard_error": standard_error(values)}


def plus_minus(mean: float, error: float | None, digits: int = 3) -> str:
    """ "0.788 ± 0.005", or the mean alone if the error is unknown."""
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def paired_difference(mine: Mapping[int, float], theirs: Mapping[int, float]) -> dict[str, Any]:
    """Scores by seed, over the seeds of both: mine less theirs.

    "interval" is the 95% interval of the mean, for normally distributed differences. Everything but the seeds is None
    without a common seed; the error and the interval are None with only one.
    """
    difference = paired(mine, theirs)
    if difference is None:
        return {"seeds": [], "mean": None, "standard_error": None, "interval": None}
    mean, margin = difference.value, difference.margin
    return {
        "seeds": list(difference.seeds),
        "mean": mean,
        "standard_error": difference.standard_error,
        "interval": None if margin is None else [mean - margin, mean + margin],
    }


def correlation(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Pearson's r and Spearman's rho of the finite pairs; None for fewer than three, or if x or y is constant."""
    pairs = np.array([pair for pair in zip(x, y, strict=True) if all(map(math.isfinite, pair))])
    result: dict[str, Any] = {"pairs": len(pairs), "pearson": None, "spearman": None}
    if len(pairs) >= MIN_PAIRS and np.ptp(pairs, axis=0).all():
        result["pearson"], result["spearman"] = (float(f(*pairs.T).statistic) for f in (pearsonr, spearmanr))
    return result


def pareto_front(points: Sequence[Point]) -> list[int]:
    """Rows of the points that no other point dominates, sorted by the first coordinate; larger is better in both.

    A point dominates another if it is worse in neither coordinate and better in one; equal points are both kept.
    """

    def dominates(other: Point, point: Point) -> bool:
        return other != point and other[0] >= point[0] and other[1] >= point[1]

    front = [row for row, point in enumerate(points) if not any(dominates(other, point) for other in points)]
    return sorted(front, key=lambda row: points[row])


def grouped(runs: Sequence[FinishedRun], seeds: Sequence[int] | None = None) -> dict[tuple[str, int], Group]:
    """The runs by method and budget, in their own order; only those of `seeds`, or all."""
    groups: dict[tuple[str, int], Group] = {}
    for run in runs:
        if seeds is None or run.seed in seeds:
            groups.setdefault((run.method, run.budget), []).append(run)
    return groups


def scores_by_seed(runs: Sequence[FinishedRun], metric: str) -> dict[int, float]:
    """Raises ConfigError: a run has no such metric."""
    for run in runs:
        if metric not in (metrics := run.matrix["metrics"]):
            raise ConfigError(f"{run.folder}: there is no metric {metric!r}, there are: {', '.join(metrics)}")
    return {run.seed: run.matrix["metrics"][metric] for run in runs}


def require_same(first: Mapping[str, Any], second: Mapping[str, Any], which: str, but: str) -> None:
    """Two mappings may differ in the key `but` alone. Raises ConfigError: names `which`, another key and its values."""
    for name in sorted({*first, *second} - {but, WHERE}):
        if first.get(name) != second.get(name):
            raise ConfigError(
                f"{which} differ in {name}, not in {but} alone: {first.get(name)!r} and {second.get(name)!r}"
            )


def require_same_settings(runs: Sequence[FinishedRun], but: str) -> None:
    """The methods' settings, see `require_same`."""
    for run in runs[1:]:
        which = f"{runs[0].folder} and {run.folder}"
        require_same(runs[0].matrix["settings"], run.matrix["settings"], which, but)
