"""A model that many tests read, and gates that are fitted in little time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gates import small_fits
from tests.tiny_models import save_tiny_llava


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny LLaVA; not to be changed."""
    return save_tiny_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(autouse=True)
def quick_gates() -> Iterator[None]:
    with small_fits():
        yield
