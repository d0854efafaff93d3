"""The budget simplex, against bisection; what is in use, and what is kept."""

import pytest
import torch
from torch import Tensor

from selector.paper.simplex import project, top_b


def by_bisection(point: Tensor, total: float) -> Tensor:
    """theta between bounds that certainly hold it, halved until float64 has no number in between."""
    low, high = float(point.min()) - total, float(point.max())
    for _ in range(200):
        theta = (low + high) / 2
        if float((point - theta).clamp(min=0).sum()) > total:
            low = theta
        else:
            high = theta
    return (point - (low + high) / 2).clamp(min=0)


def draw(n: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 2, 3, 17, 1000, 100_000])
@pytest.mark.parametrize("total", [0.5, 32.0, 256.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_projection_agrees_with_bisection(n: int, total: float, scale: float) -> None:
    point = draw(n, scale)
    projected = project(point, total)
    assert (projected >= 0).all()
    assert float(projected.sum()) == pytest.approx(total, rel=1e-10)
    torch.testing.assert_close(projected, by_bisection(point, total), rtol=0, atol=1e-10 * max(scale, total))


def test_top_b_takes_the_largest_and_breaks_ties_by_order() -> None:
    weights = torch.tensor([0.5, 2.0, 0.5, 0.0, 2.0, 0.5], dtype=torch.float64)
    assert top_b(weights, 2).tolist() == [1, 4]
    assert top_b(weights, 3).tolist() == [0, 1, 4]
    assert top_b(weights, 4).tolist() == [0, 1, 2, 4]
    assert top_b(weights, 99).tolist() == [0, 1, 2, 3, 4, 5]
