"""What a researcher wrote outside the repository: the documented examples run."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.research.continual.__main__ import main
from tests.research.small_streams import small_suite

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks of the demo world, each with two splits."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    small_suite(tmp_path / "demo")
    for name in ("field", "guild"):
        shutil.copytree(tmp_path / "demo" / name, tmp_path / "data" / name)
        (tmp_path / "data" / name / "validation.jsonl").unlink()
    return tmp_path / "data"


def test_the_documented_examples(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--suite", "own_suite:load", "--method", "no_memory", "own_method:WordBias", "--answer", "offline"]
    settings = ["--set", "own_word_bias.strength=50", "--jobs", "1", "--data", str(data), "--out", str(out)]
    assert main(["run", *arguments, *settings]) == 0
    folder = out / "own_word_bias" / "budget-32" / "seed-0"
    matrix = json.loads((folder / "matrix.json").read_bytes())
    assert matrix["settings"] == {"name": "own_word_bias", "strength": 50.0}
    assert matrix["base"] == [None, None]
    assert "base_final" not in matrix["metrics"]
    assert matrix["metrics"]["own: final"] == pytest.approx(sum(matrix["accuracy"][-1]) / 2)
    lines = [json.loads(line) for line in (folder / "01-guild" / "predictions.jsonl").read_text().splitlines()]
    assert any(0 < line["score"] < 1 for line in lines)
    plain = (out / "no_memory" / "budget-32" / "seed-0" / "01-guild" / "predictions.jsonl").read_text()
    assert [line["answer"] for line in lines] != [json.loads(line)["answer"] for line in plain.splitlines()]
    assert "own: over time" in (out / "report.html").read_text()
    assert json.loads((out / "run.json").read_bytes())["new_tokens"] == 16
