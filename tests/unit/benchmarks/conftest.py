"""Gates that are fitted in little time."""

from collections.abc import Iterator

import pytest

from tests.gates import small_fits


@pytest.fixture(autouse=True)
def quick_gates() -> Iterator[None]:
    with small_fits():
        yield
