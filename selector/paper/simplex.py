"""The budget simplex {w in R^N : w >= 0, sum w = B}: projection onto it and rounding to B entries."""

from __future__ import annotations

import torch
from torch import Tensor


def project(point: Tensor, total: float) -> Tensor:
    """The nearest point of the simplex in Euclidean distance (paper, Algorithm 1's projection step).

    w_i = max(point_i - theta, 0) with the one theta that makes the sum right, found from the sorted coordinates.

    Args:
        point: [N] float64, finite.
        total: B > 0.

    Returns:
        [N] float64; coordinates outside the support are exactly 0.
    """
    assert point.dtype == torch.float64, "rounding of the threshold grows with N; project in float64"
    assert point.ndim == 1
    assert total > 0
    # Adding a constant to every coordinate moves the projection nowhere, and a largest one of 0 avoids cancellation.
    shifted = point - point.max()
    falling = shifted.sort(descending=True).values  # [N]
    count = torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)  # [N]
    thetas = (falling.cumsum(0) - total) / count  # [N]: the threshold if the support were the first `count`
    support = int((falling > thetas).sum())
    return (shifted - thetas[support - 1]).clamp(min=0)


def top_b(weights: Tensor, count: int) -> Tensor:
    """The `count` largest weights (paper, TopB); of equal ones those that stand first.

    Args:
        weights: [N].
        count: at least 1; above N it means all.

    Returns:
        [min(count, N)] int64, rising.
    """
    assert count >= 1
    return weights.argsort(descending=True, stable=True)[:count].sort().values


def support_size(weights: Tensor) -> int:
    """How many entries have any weight at all."""
    return int((weights > 0).sum())


def effective_entries(weights: Tensor) -> float:
    """(sum w)^2 / sum w^2: N for equal weights, 1 when a single entry has everything."""
    return float(weights.sum() ** 2 / (weights**2).sum())
