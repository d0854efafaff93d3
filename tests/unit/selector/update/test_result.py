"""Whether a memory is worth writing."""

import pytest

from selector.update.result import helps


@pytest.mark.parametrize(
    ("losses", "right", "expected"),
    [
        (None, None, True),
        ((1.0, 2.0), None, True),
        ((2.0, 2.0), None, False),
        ((2.0, 2.0), (0.0, 0.0), False),
        ((2.0, 2.0), (1.0, 0.0), True),  # facts answer, and the entries beside them change nothing
        ((2.0, 1.0), (0.5, 0.5), False),
        ((1.0, 2.0), (0.0, 0.5), True),
    ],
)
def test_a_memory_helps(losses: tuple[float, float] | None, right: tuple[float, float] | None, expected: bool) -> None:
    names = ("deployed", "no_memory")
    report = {
        "validation_nll": None if losses is None else dict(zip(names, losses, strict=True)),
        "validation_accuracy": None if right is None else dict(zip(names, right, strict=True)),
    }
    assert helps(report) == expected
