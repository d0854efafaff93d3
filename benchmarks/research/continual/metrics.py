"""Scores of a stream, each a function of the accuracy matrix a[i, t]: accuracy on task t after learning task i.

Sources: the paper's section "Metrics and Continual Learning Scores", and the benchmarks that it follows. Shapes: T
tasks. A matrix is [T, T] float64, rows in the order of learning; entries of tasks not yet seen (t > i) may be NaN and
are never read. Scores are on the scale of the matrix (0 to 1 here), forgetting is positive if something is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def accuracy_matrix(rows: Sequence[Sequence[float]]) -> Matrix:
    """[T, T] with NaN for tasks not yet seen, from rows a[i, 0..i]. Raises ValueError: a row has another length."""
    size = len(rows)
    matrix = np.full((size, size), np.nan)
    for i, row in enumerate(rows):
        if len(row) not in (i + 1, size):
            raise ValueError(f"row {i} of an accuracy matrix of {size} tasks has {len(row)} entries")
        matrix[i, : i + 1] = row[: i + 1]
    return matrix


def average(a: Matrix) -> float:
    """Mean of the final scores on all tasks, 1/T sum_t a[T, t].

    The benchmarks name it Avg (UCIT; HiDe-LLaVA), MAA (the paper), AP (continual VQA; CL-MoE, QUAD) and AvgAcc (LiIT;
    Adapt-infinity).
    """
    return float(a[-1].mean())


def last(a: Matrix) -> float:
    """Last (UCIT; HiDe-LLaVA): the final score on the task learned last, a[T, T]."""
    return float(a[-1, -1])


def mean_average_accuracy_over_time(a: Matrix) -> float:
    """MAA as CoIN itself defines it: the mean over i of the mean score on the tasks seen by then."""
    return float(np.mean([a[i, : i + 1].mean() for i in range(len(a))]))


def backward_transfer(a: Matrix) -> float:
    """BWT (CoIN): 1/(T-1) sum_{t<T} (a[T, t] - a[t, t]); negative if tasks are forgotten, 0 for one task."""
    if len(a) == 1:
        return 0.0
    return float((a[-1] - a.diagonal())[:-1].mean())


def average_forgetting(a: Matrix) -> float:
    """AF or Forget (continual VQA; CL-MoE, QUAD): 1/(T-1) sum_{t<T} (max_i a[i, t] - a[T, t]), over i >= t; >= 0."""
    if len(a) == 1:
        return 0.0
    return float(np.mean([a[t:, t].max() - a[-1, t] for t in range(len(a) - 1)]))


def forgetting_rate(a: Matrix) -> float:
    """Forgetting Rate (LiIT), "averaged across skills and timesteps": the mean fall since the previous step, a rise
    counts as 0.

    Over all steps i >= 1 and the tasks t < i; 0 for one task.
    """
    falls = [max(0.0, float(a[i - 1, t] - a[i, t])) for i in range(1, len(a)) for t in range(i)]
    return float(np.mean(falls)) if falls else 0.0


def base_retention(base: Sequence[float], untouched: float) -> float:
    """The last of the base accuracies [T] divided by the untouched model's. Raises ValueError: that is not positive."""
    if not untouched > 0:
        raise ValueError(f"the untouched model's accuracy must be positive, found {untouched}")
    return base[-1] / untouched


def standard_error(values: Sequence[float]) -> float:
    """Of the mean over seeds: the sample's standard deviation (n - 1) divided by sqrt(n); NaN for a single seed."""
    if len(values) < 2:
        return math.nan
    return float(np.std(np.asarray(values, np.float64), ddof=1) / math.sqrt(len(values)))


def mean_of_new_tasks(a: Matrix) -> float:
    """MFT (CoIN's family): the mean score on each task right after it was learned."""
    return float(a.diagonal().mean())


def signed_forgetting(a: Matrix) -> float:
    """Forget as VQACL's code has it: 1/(T-1) sum_{t<T} (max_{i<T} a[i, t] - a[T, t]), over stages before the last.

    Negative if the last stage is the best one; CL-MoE's published -0.02 needs this form. 0 for one task.
    """
    if len(a) == 1:
        return 0.0
    return float(np.mean([a[t:-1, t].max() - a[-1, t] for t in range(len(a) - 1)]))


def relative_gain(final: Sequence[float], upper_bounds: Sequence[float]) -> float:
    """Relative Gain (LiIT): the mean over skills of score / upper bound, in percent; may exceed 100.

    The published upper bounds were not found. Raises ValueError: their number is another, or one is not positive.
    """
    if len(final) != len(upper_bounds) or min(upper_bounds) <= 0:
        raise ValueError(f"expected {len(final)} positive upper bounds, found {list(upper_bounds)}")
    return float(100 * np.mean(np.asarray(final, np.float64) / np.asarray(upper_bounds, np.float64)))


def summary(a: Matrix, base: Sequence[float | None] = ()) -> dict[str, float]:
    """All scores that follow from a run's own matrix and its base accuracies, if it has any."""
    known = [value for value in base if value is not None]
    return {
        **dict.fromkeys(("Avg", "MAA", "AP", "AvgAcc"), average(a)),
        "Last": last(a),
        "MAA_over_time": mean_average_accuracy_over_time(a),
        "BWT": backward_transfer(a),
        "AF": average_forgetting(a),
        "forgetting_rate": forgetting_rate(a),
        **({"base_final": float(known[-1]), "base_lowest": float(min(known))} if known else {}),
    }
