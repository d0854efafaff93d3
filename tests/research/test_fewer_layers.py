"""Memory in some layers alone has the bytes of memory in all, and does nothing elsewhere."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.research import fewer_layers
from benchmarks.research.fewer_layers import InSomeLayers, layers_of, problem_of, settings_of
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.cli.columns import ColumnOptions
from selector.data.examples import Example, read_task
from selector.refined.training import PAYLOADS
from tests.tiny_families import FAMILIES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows() -> list[Example]:
    columns = ColumnOptions(columns="prompt=ticket,answer=team", task_name="support").of_table()
    return read_task(fewer_layers.TABLES / "train.csv", columns)[:12]


def test_other_layers_stay_as_they_were(folder: Path, rows: list[Example]) -> None:
    backbone = Backbone.load(folder)
    with tiled_attention(backbone):
        scorer = Scorer(backbone)
        problem = problem_of(scorer, rows, settings_of(2, 0))
        training = InSomeLayers(problem, settings_of(2, 0), 0.1, [1])
        for _ in range(2):  # in the first step, keys and inner maps get no gradient: values and outer maps are 0
            training.take_step()
    for name in PAYLOADS:
        before, after = getattr(problem.memory, name), getattr(training.memory(), name)
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[1], after[1])
    assert not training.memory().payload_values[0].any()


def test_every_choice_is_measured_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = settings_of(1, 0).model_copy(update={"steps": 1, "payload_tokens": 2, "map_rank": 1})
    monkeypatch.setattr(fewer_layers, "settings_of", lambda times, seed: few)
    monkeypatch.setattr(fewer_layers, "CHOICES", ("all", "last half", "by gradient"))
    output = tmp_path / "result.json"
    arguments = ["--model", str(folder), "--chosen", "1", "--output", str(output)]
    assert fewer_layers.main(arguments) == 0
    first = json.loads(output.read_text())["rows"]
    assert [(row["layers"], len(row["trained"])) for row in first] == [("all", 3), ("last half", 1), ("by gradient", 1)]
    assert all(0 <= row["right"] <= 24 and row["nll"] > 0 for row in first)
    assert fewer_layers.main(arguments) == 0
    assert json.loads(output.read_text())["rows"] == first
    capsys.readouterr()


def test_which_layers_are_trained(folder: Path, rows: list[Example]) -> None:
    scorer = Scorer(Backbone.load(folder))
    assert layers_of("last half", scorer, rows, 1, 0) == [2]
    assert layers_of("every third", scorer, rows, 1, 0) == [2]
    assert layers_of("every second of the last two thirds", scorer, rows, 1, 0) == [1]
    assert layers_of("all", scorer, rows, 1, 0) == [0, 1, 2]
