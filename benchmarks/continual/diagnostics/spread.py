"""Means of a few measured values, and how far they lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.continual.metrics import standard_error


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (n - 1) and standard error of the mean; a single value has neither of the two."""
    several = len(values) > 1
    return {
        "mean": statistics.mean(values),
        "standard_deviation": statistics.stdev(values) if several else None,
        "standard_error": standard_error(values) if several else None,
    }


def plus_minus(mean: float, error: float | None, digits: int = 3) -> str:
    """ "0.788 ± 0.005", or the mean alone where no error is known."""
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
