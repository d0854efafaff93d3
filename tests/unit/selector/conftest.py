"""Tiny backbones and a tiny task, made once for the whole session."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from selector.backbone.model import Backbone
from selector.data.examples import Example, read_task
from tests.gates import small_fits
from tests.tiny_models import TINY_MODELS, picture
from tests.unit.selector.stream import Stream

QUESTIONS = (
    "What colour is the circle?",
    "How many squares are there? Answer with one word.",
    "Is the red triangle left of the blue one, and does the picture show a ring? Answer in a sentence.",
)


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


def unit_vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random directions, along the last axis."""
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


@functools.cache
def in_float64(model: Path) -> Backbone:
    """For finite differences: transformers' RMS norms round to float32 whatever the model's type, and here do not."""
    backbone = Backbone.load(model, dtype=torch.float64)
    norms = [module for module in backbone.model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    for norm in norms:
        norm.forward = functools.partial(_norm, norm)
    return backbone


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def record(number: int, **changes: Any) -> dict[str, Any]:
    """A line of task data; its picture is `images/NUMBER.png`."""
    content = [
        {"type": "image_url", "image_url": {"url": f"images/{number}.png"}},
        {"type": "text", "text": QUESTIONS[number % len(QUESTIONS)]},
    ]
    return {
        "id": f"e{number}",
        "task": "colours",
        "messages": [{"role": "user", "content": content}],
        "answer": f"answer {number}",
    } | changes


def write_task(folder: Path, records: list[dict[str, Any]], num_pictures: int = 12) -> Path:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(num_pictures):
        # Sizes differ, so that a model with dynamic resolution gets prompts of different length.
        picture(number, width=48 + 16 * (number % 3)).save(folder / "images" / f"{number}.png")
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in records))
    return path


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


def questions_about(task: str, text: str) -> list[dict[str, Any]]:
    """Twelve lines of a task's data."""
    lines = [record(number, id=f"{task}{number}", task=task) for number in range(12)]
    for line in lines:
        line["messages"][0]["content"][1]["text"] = text
    return lines


@pytest.fixture
def stream(tmp_path: Path, model_folders: dict[str, Path], tasks: dict[str, Path]) -> Stream:
    """By the paper's recipe."""
    (tmp_path / "out").mkdir()
    return Stream(tmp_path / "out", model_folders["llava"], tasks)
