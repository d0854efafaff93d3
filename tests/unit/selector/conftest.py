"""Tiny backbones and a tiny task, made once for the whole session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from selector.backbone.model import Backbone
from selector.data.examples import Example, read_task
from tests.gates import small_fits
from tests.task_data import questions_about, record, write_task
from tests.tiny_models import TINY_MODELS
from tests.unit.selector.stream import Stream


@pytest.fixture(scope="package", autouse=True)
def gates_of_few_questions() -> Iterator[None]:
    with small_fits():
        yield


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(root / name) for name, save in TINY_MODELS.items()}


@pytest.fixture(scope="session", params=list(TINY_MODELS))
def backbone(request: pytest.FixtureRequest, model_folders: dict[str, Path]) -> Backbone:
    """Each tiny model in turn."""
    return Backbone.load(model_folders[request.param])


@pytest.fixture(scope="session")
def llava(model_folders: dict[str, Path]) -> Backbone:
    return Backbone.load(model_folders["llava"])


@pytest.fixture(scope="session")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"), [record(number) for number in range(12)])


@pytest.fixture(scope="session")
def examples(task_file: Path) -> list[Example]:
    return read_task(task_file)


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tasks that ask their own question about the same pictures, by name."""
    questions = {
        "colours": "What colour is the circle?",
        "counts": "How many squares are there? Answer with a number.",
        "places": "Is the red triangle left of the blue one?",
        "base": "Describe the whole picture in one long sentence, please.",
    }
    folder = tmp_path_factory.mktemp("tasks")
    return {task: write_task(folder / task, questions_about(task, text)) for task, text in questions.items()}


@pytest.fixture
def stream(tmp_path: Path, model_folders: dict[str, Path], tasks: dict[str, Path]) -> Stream:
    """By the paper's recipe."""
    (tmp_path / "out").mkdir()
    return Stream(tmp_path / "out", model_folders["llava"], tasks)
