"""docs/archive/ is what the files of results say, and the plots of docs/results.md can be drawn from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.archive import __main__ as archive
from benchmarks.archive.tables import LONGEST, tables_of
from benchmarks.research.figures import FIGURES, draw, forgotten

DOCS = archive.ROOT / "docs"


def test_the_pages_are_those_of_the_results() -> None:
    made = archive.pages()
    assert {path.name for path in archive.FOLDER.iterdir()} == made.keys()
    for name, text in made.items():
        assert (archive.FOLDER / name).read_text() == text, f"{name}: run python -m benchmarks.archive"


def test_every_file_of_results_stands_on_one_page() -> None:
    files = [file for section in archive.sections() for file in section["files"]]
    assert sorted(files) == sorted(path.name for path in archive.RESULTS.glob("*.json"))


def test_the_page_of_results_is_short_and_shows_every_plot(tmp_path: Path) -> None:
    text = (DOCS / "results.md").read_text()
    assert len(text.splitlines()) <= 150
    draw(archive.RESULTS, tmp_path)
    for name in FIGURES:
        assert f"(images/{name}.svg)" in text
        drawn, kept = (tmp_path / f"{name}.svg").read_text(), (DOCS / "images" / f"{name}.svg").read_text()
        assert labels(drawn) == labels(kept), f"{name}: run python -m benchmarks.archive --figures"


def labels(svg: str) -> list[str]:
    """The texts of a plot."""
    return [line.partition(">")[2].partition("</text>")[0] for line in svg.splitlines() if "</text>" in line]


def test_what_is_forgotten_by_hand() -> None:
    matrix = [[0.9, 0.0, 0.0], [0.5, 0.8, 0.0], [0.7, 0.6, 1.0]]
    assert forgotten(matrix, 1) == pytest.approx(0.4)
    assert forgotten(matrix, 2) == pytest.approx((0.2 + 0.2) / 2)


def test_tables_by_shape() -> None:
    mean = {"mean": 0.5, "standard_error": 0.25}
    (plain,) = tables_of({"a": 1.23456, "b": [1, 2], "machine": {"cpu": "x"}, "c": mean, "d": list(range(20))})
    rows = plain.splitlines()[2:]
    assert rows == ["| a | 1.235 |", "| b | 1, 2 |", "| c | 0.500 ± 0.250 |", "| d | 20 numbers |"]
    name, table, left = tables_of({"rows": [{"x": 0, "y": None, "z": "a|b"}] * (LONGEST + 2)})
    assert (name, left) == ("*rows*", "2 more rows are in the file.")
    assert table.splitlines()[0] == "| x | z |"
    assert table.splitlines()[2] == "| 0 | a\\|b |"
    name, table = tables_of({"by task": {"one": {"right": 1}, "two": {"right": 2}}})
    assert table.splitlines()[2:] == ["| one | 1 |", "| two | 2 |"]


def test_a_stream_and_a_server() -> None:
    about = {"order": ["a"], "results": [{"method": "no_memory", "budget": 8, "seeds": [0, 1], "stored_bytes": 0}]}
    about["results"][0] |= {"metrics": {"AP": {"mean": 0.1, "standard_error": None}}, "tasks": {"a": {"mean": 0.1}}}
    first, table, by_task = tables_of(about)
    assert first == "Tasks: a. Seeds: 0, 1."
    assert table.splitlines()[2] == "| no memory | 8 | 0.100 |  |  | 0 |  |"
    assert by_task.splitlines()[2] == "| no memory | 8 | 0.100 |"
    timed = {"requests": 4, "ttft_ms": 12.345, "ttft_ratio": 1.234, "tpot_ms": 1.0, "tokens_per_s": 99.9}
    first, table, *_ = tables_of({"concurrency": {"1": {"none": timed}}})
    assert first == "Requests at the same time: 1."
    assert table.splitlines()[2] == "| none | 4 | 12.3 (1.2) | 1 | 99.9 |"
