"""Statistics that several diagnostics share: spreads, correlations, and runs that differ in one thing alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from benchmarks.continual.metrics import standard_error
from benchmarks.continual.results import WHERE, FinishedRun
from inducekv_vllm.errors import ConfigError

MIN_PAIRS = 3  # for a correlation


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


def correlation(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Pearson's r and Spearman's rho of the finite pairs; None for fewer than three, or if x or y is constant."""
    pairs = np.array([pair for pair in zip(x, y, strict=True) if all(map(math.isfinite, pair))])
    result: dict[str, Any] = {"pairs": len(pairs), "pearson": None, "spearman": None}
    if len(pairs) >= MIN_PAIRS and np.ptp(pairs, axis=0).all():
        result["pearson"], result["spearman"] = (float(f(*pairs.T).statistic) for f in (pearsonr, spearmanr))
    return result


def require_same(first: Mapping[str, Any], second: Mapping[str, Any], which: str, but: str) -> None:
    """Two mappings may differ in the key `but` alone. Raises ConfigError: names `which`, another key and its values."""
    for name in sorted({*first, *second} - {but, WHERE}):
        if first.get(name) != second.get(name):
            raise ConfigError(
                f"{which} differ in {name}, not in {but} alone: {first.get(name)!r} and {second.get(name)!r}"
            )
