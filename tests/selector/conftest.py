"""Tiny backbones and a tiny task, made once for the whole session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selector.backbone.model import Backbone
from tests.tiny_models import TINY_MODELS, picture

QUESTIONS = (
    "What colour is the circle?",
    "How many squares are there? Answer with one word.",
    "Is the red triangle left of the blue one, and does the picture show a ring? Answer in a sentence.",
)


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
