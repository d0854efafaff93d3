"""The small streams, made and run once for all tests of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.continual.__main__ import main
from benchmarks.continual.suites import Suite
from benchmarks.demo.model import CHECKPOINT
from selector.backbone.model import Backbone
from tests.benchmarks.small_streams import ORDER, command, small_suite
from tests.tiny_models import save_tiny_llava


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    small_suite(folder)
    return folder


@pytest.fixture(scope="session")
def suite(data: Path) -> Suite:
    return small_suite(data).ordered(ORDER)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny LLaVA; not to be changed."""
    return save_tiny_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    """Not to be changed."""
    return Backbone.load(CHECKPOINT)


@pytest.fixture(scope="session")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has interrupted, its states kept; not to be changed."""
    out = tmp_path_factory.mktemp("results") / "out"
    assert main(command(data, out, "--results", str(out.parent / "results.json"), "--keep-states", "all")) == 0
    return out
