"""Facts by their number: what is timed is found, and nothing else is."""

import json
from pathlib import Path

import pytest

from benchmarks.research.facts import size


def test_each_size_has_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["size", "--facts", "5", "40", "--output", str(tmp_path / "size.json")])
    assert size.main() == 0
    rows = json.loads((tmp_path / "size.json").read_text())["sizes"]
    assert [row["facts"] for row in rows] == [5, 40]
    assert [row["found"] for row in rows] == [1.0, 1.0]
    assert all(0 < row["ms_median"] <= row["ms_p99"] for row in rows)


def test_names_are_of_their_own() -> None:
    assert len({size.name(number) for number in range(5000)}) == 5000
