"""Data, models and a finished run that many tests read: each is made once."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.research.continual.__main__ import main
from benchmarks.research.continual.suites import Suite
from benchmarks.research.continual.suites.made import load_demo
from selector.backbone.model import Backbone
from server.demo import CHECKPOINT
from tests.research.learned_streams import SMALL, LearnedStream
from tests.research.small_streams import BASE_SIZES, ORDER, SIZES, command, small_suite
from tests.unit.benchmarks.conftest import quick_gates  # noqa: F401 - fixtures

DemoSuite = Callable[..., tuple[Path, Suite]]
Learned = Callable[[str], LearnedStream]


@pytest.fixture(scope="session")
def demo_suite(tmp_path_factory: pytest.TempPathFactory) -> DemoSuite:
    """Makes data of the demo world with few examples of each split, once: (train, validation, test, *tasks) gives the
    folder and the suite."""

    @functools.cache
    def written(train: int, validation: int, test: int) -> tuple[Path, Suite]:
        folder = tmp_path_factory.mktemp("data")
        return folder, load_demo(folder, {"train": train, "validation": validation, "test": test}, BASE_SIZES)

    def make(train: int, validation: int, test: int, *tasks: str) -> tuple[Path, Suite]:
        folder, suite = written(train, validation, test)
        return folder, suite.ordered(tasks) if tasks else suite

    return make


@pytest.fixture(scope="session")
def data(demo_suite: DemoSuite) -> Path:
    """Of the small suite; not to be changed."""
    return demo_suite(*SIZES.values())[0]


@pytest.fixture(scope="session")
def suite(data: Path) -> Suite:
    return small_suite(data).ordered(ORDER)


@pytest.fixture(scope="session")
def backbone(model: Path) -> Backbone:
    """The tiny LLaVA; not to be changed."""
    return Backbone.load(model)


@pytest.fixture(scope="session")
def demo_backbone() -> Backbone:
    """The demo model; not to be changed."""
    return Backbone.load(CHECKPOINT)


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end without the page, which takes longer to draw than such small streams to run."""
    monkeypatch.setattr("benchmarks.research.continual.report.command.write_report", lambda *_, **__: {})


@pytest.fixture(scope="session")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has interrupted, its states kept; not to be changed."""
    out = tmp_path_factory.mktemp("results") / "out"
    assert main(command(data, out, "--results", str(out.parent / "results.json"), "--keep-states", "all")) == 0
    return out


@pytest.fixture(scope="session")
def learned(model: Path, suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Two tasks by a method's name; each method learns once, when it is first asked for."""

    @functools.cache
    def learn(name: str) -> LearnedStream:
        return LearnedStream(SMALL[name], model, suite, tmp_path_factory.mktemp(name))

    return learn
