"""Memory in some layers alone has the bytes of memory in all, and does nothing elsewhere."""

import json
from pathlib import Path

import pytest

from benchmarks.research import fewer_layers
from benchmarks.research.fewer_layers import layers_of, settings_of
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.cli.columns import ColumnOptions
from selector.data.examples import Example, read_task
from tests.tiny_families import FAMILIES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows() -> list[Example]:
    columns = ColumnOptions(columns="prompt=ticket,answer=team", task_name="support").of_table()
    return read_task(fewer_layers.TABLES / "train.csv", columns)[:12]


def test_every_choice_is_measured_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fewer_layers, "TOKENS", 2)
    monkeypatch.setattr(fewer_layers, "RANK", 1)
    few = settings_of("generation", 0).model_copy(update={"steps": 1})
    monkeypatch.setattr(fewer_layers, "settings_of", lambda *_: few)
    output = tmp_path / "result.json"
    arguments = ["--model", str(folder), "--chosen", "1", "--output", str(output)]
    arguments += ["--layers", "all", "last half", "by gradient"]
    assert fewer_layers.main(arguments) == 0
    first = json.loads(output.read_text())["rows"]
    assert [(row["layers"], len(row["trained"])) for row in first] == [("all", 3), ("last half", 1), ("by gradient", 1)]
    assert all(0 <= row["right"] <= 24 and row["nll"] > 0 for row in first)
    assert fewer_layers.main(arguments) == 0
    assert json.loads(output.read_text())["rows"] == first
    capsys.readouterr()


def test_which_layers_are_trained(folder: Path, rows: list[Example]) -> None:
    scorer = Scorer(Backbone.load(folder))
    settings = settings_of("generation", 0)
    assert layers_of("last half", scorer, rows, 1, settings) == [2]
    assert layers_of("every third", scorer, rows, 1, settings) == [2]
    assert layers_of("every second of the last two thirds", scorer, rows, 1, settings) == [1]
    assert layers_of("all", scorer, rows, 1, settings) == [0, 1, 2]
