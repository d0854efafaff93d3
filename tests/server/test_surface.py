"""What a user can set stays few: a new flag, field or parameter needs another one to go."""

from tests.surface import surface

MOST = 170


def test_no_more_than_are_needed() -> None:
    found = surface()
    assert all(found.values())
    assert sum(map(len, found.values())) <= MOST, "python -m tests.surface --all lists them"
