"""The measurement of the paper's recipe on a first task: a stopped selection goes on to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.selector import paper_recipe
from selector.paper import bilevel
from tests.benchmarks.conftest import DemoSuite

ITERATIONS = 3


@pytest.fixture
def data(demo_suite: DemoSuite) -> Path:
    return demo_suite(4, 1, 3, "guild", "field")[0]


def measured(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    command = ["paper_recipe", "--data", str(data), "--budget", "2", "--iterations", str(ITERATIONS), "--seeds", "0"]
    monkeypatch.setattr("sys.argv", [*command, "--threads", "1", *arguments])
    assert paper_recipe.main() == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_stopped_selection_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    iterate, taken = bilevel.iterate, []

    def stopping(*given: Any) -> Any:
        if len(taken) == 1:
            taken.append("stopped")
            raise KeyboardInterrupt
        taken.append("done")
        return iterate(*given)

    work = ("--work", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(bilevel, "iterate", stopping)
        with pytest.raises(KeyboardInterrupt):
            measured(data, patch, capsys, *work)
        found = measured(data, patch, capsys, *work)
    assert taken == ["done", "stopped", *["done"] * (ITERATIONS - 1)]
    whole = measured(data, monkeypatch, capsys)
    assert found["runs"][0]["test_nll"] == pytest.approx(whole["runs"][0]["test_nll"], abs=1e-6)
    assert len(list(tmp_path.iterdir())) == 1
    measured(data, monkeypatch, capsys, *work, "--gamma", "0.2")  # other settings leave that progress alone
    assert len(list(tmp_path.iterdir())) == 2
