"""The stream benchmark over text alone: a suite file, a text-only model, methods of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.research.continual.__main__ import main
from benchmarks.research.continual.methods import METHODS
from tests.task_data import record
from tests.tiny_families import FAMILIES

TASKS = {"colours": "What colour is the circle?", "counts": "How many squares are there?", "base": "yes or no?"}
COUNTS = {"train": 8, "validation": 3, "test": 3}
RUN = ["no_memory", "refined", "random_memory", "prompt_replay", "lora_replay", "gated_task_lora", "knn_copier"]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Every question is a plain string."""
    description = ['name = "text"']
    for task, question in TASKS.items():
        description.append("[base]" if task == "base" else f'[[tasks]]\nname = "{task}"')
        for split, count in COUNTS.items():
            asked = [(f"{task}-{split}-{row}", f"{question} {split} {row}") for row in range(count)]
            lines = [
                record(row, id=name, task=task, messages=[{"role": "user", "content": text}])
                for row, (name, text) in enumerate(asked)
            ]
            (tmp_path / f"{task}-{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            description.append(f'{split} = "{task}-{split}.jsonl"')
    (tmp_path / "suite.toml").write_text("\n".join(description))
    return tmp_path / "suite.toml"


@pytest.mark.slow
def test_methods_of_every_kind(suite: Path, tmp_path: Path) -> None:
    model, out = FAMILIES["llama"](tmp_path / "model"), tmp_path / "out"
    small = ["--set", "steps=2", "--set", "anchors_per_task=4", "--set", "learning_rate=0.01"]
    options = ["--budget", "8", "--jobs", "1", "--answer", "offline", "--suite", str(suite), "--model", str(model)]
    assert main(["run", "--method", *RUN, *options, *small, "--out", str(out)]) == 0
    assert {METHODS[name].kind for name in RUN} >= {"none", "bundle", "adapter", "exemplars", "copier"}
    for name in RUN:
        matrix = json.loads((out / name / "budget-8" / "seed-0" / "matrix.json").read_bytes())
        assert matrix["complete"]
        assert len(matrix["base"]) == 2
