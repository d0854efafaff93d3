"""Which of several points no other one beats."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]


def pareto_front(points: Sequence[Point]) -> list[int]:
    """Rows of the points, in order of the first number, that none beats; more is better of both numbers.

    A point beats another that it is not behind in anything, and ahead of in something; equal points stand together.
    """
    kept = [row for row, point in enumerate(points) if not any(_beats(other, point) for other in points)]
    return sorted(kept, key=lambda row: points[row])


def _beats(one: Point, other: Point) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]
