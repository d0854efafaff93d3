"""A model that many tests read, and gates that are fitted in little time."""

from __future__ import annotations

from pathlib import Path

import pytest

from selector.gate import fitting_set, training
from tests.tiny_models import save_tiny_llava


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny LLaVA; not to be changed."""
    return save_tiny_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(autouse=True)
def quick_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates are fitted to a few of the everyday requests: what they tell apart is measured elsewhere."""
    for name, count in {"REQUESTS": 60, "NEAR_MISSES": 2, "NOISE": 10}.items():
        monkeypatch.setattr(fitting_set, name, count)
    monkeypatch.setattr(training, "EPOCHS", 2)
