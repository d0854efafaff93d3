"""The budget simplex {w in R^N : w >= 0, sum w = B}: Euclidean projection, and rounding to B entries."""

import torch
from torch import Tensor


def project(point: Tensor, total: float) -> Tensor:
    """The nearest point of the simplex in Euclidean distance (paper, Algorithm 1's projection step).

    w_i = max(point_i - theta, 0), with theta computed from the sorted coordinates so that the sum is `total`.

    Args:
        point: [N] float64, finite.
        total: B > 0.

    Returns:
        [N] float64; coordinates outside the support are exactly 0.
    """
    assert point.dtype == torch.float64, "rounding of the threshold grows with N; project in float64"
    assert point.ndim == 1
    assert total > 0
    # A constant added to every coordinate does not change the projection; a maximum of 0 avoids cancellation.
    shifted = point - point.max()
    falling = shifted.sort(descending=True).values  # [N]
    count = torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)  # [N]
    thetas = (falling.cumsum(0) - total) / count  # [N]: the threshold if the support were the first `count`
    support = int((falling > thetas).sum())
    return (shifted - thetas[support - 1]).clamp(min=0)


def top_b(weights: Tensor, count: int) -> Tensor:
    """The `count` largest weights (paper, TopB); ties go to the first.

    Args:
        weights: [N].
        count: at least 1; above N it means all.

    Returns:
        [min(count, N)] int64, increasing.
    """
    assert count >= 1
    return weights.argsort(descending=True, stable=True)[:count].sort().values


def support_size(weights: Tensor) -> int:
    """The number of entries with any weight."""
    return int((weights > 0).sum())


def effective_entries(weights: Tensor) -> float:
    """(sum w)^2 / sum w^2: N for equal weights, 1 for a single entry."""
    return float(weights.sum() ** 2 / (weights**2).sum())
