"""The page and the JSON file of a hand-made folder: the demo world, two tasks, a few questions."""

import copy
import itertools
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.research.continual.__main__ import main
from benchmarks.research.continual.report import names
from benchmarks.research.continual.report.command import write_report
from benchmarks.research.continual.report.content import read_file, record_command
from benchmarks.research.continual.report.page import render_html
from server.demo import CHECKPOINT
from tests.research.finished_runs import write_configuration, write_finished_run

ORDER = ("guild", "digit")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SCORES = ("AP", "AF", "base_final")
SWEEPS = {
    "diagnostic": "sweeps",
    "source": "Hyperparameter Sensitivity",
    "finding": "It opens <often>.",
    "method": "refined",
    "budget": 32,
    "tasks": ["guild", "digit"],
    "defaults": {"steps": 7},
    "settings": {
        "steps": [{"value": n} | {s: {"mean": 0.5, "standard_deviation": None} for s in SCORES} for n in (7, 9)]
    },
}
# Of four questions of each of the two tasks, how many are right after each task; of nine base questions, how many.
RIGHT = {
    "no_memory": [[0], [0, 1], 9],
    "lora_replay": [[4], [3, 4], 5],
    "refined": [[4], [4, 3], 9],
    "refined_no_gate": [[3], [2, 2], 4],
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with one diagnostic and its report; not to be changed."""
    folder = tmp_path_factory.mktemp("run") / "out"
    for (method, (*rows, base)), seed in itertools.product(RIGHT.items(), (0, 1)):
        rights = [
            {task: [n < count for n in range(4)] for task, count in zip(ORDER, row, strict=False)}
            | {"base": [n < base for n in range(9)]}
            for row in rows
        ]
        composition = {"composition": {"before": {}, "after": {"guild": 4}}} if method == "refined" else {}
        settings = {"name": method, "steps": 7, "learning_rates": [0.001]}
        stored = [0 if method == "no_memory" else 1024] * 2
        reports = [{"history": [{"step": 0}]} | composition] * 2
        write_finished_run(folder, method, rights, seed=seed, settings=settings, stored_bytes=stored, reports=reports)
    write_configuration(folder, order=list(ORDER), where={"suite": "demo", "data": "", "model": str(CHECKPOINT)})
    record_command(folder, ["python", "-m", "benchmarks.research.continual", "run", "--out", str(folder)])
    (folder / "diagnostics").mkdir()
    (folder / "diagnostics" / "sweeps.json").write_text(json.dumps(SWEEPS))
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def content(run_folder: Path) -> dict[str, Any]:
    return json.loads((run_folder / "report.json").read_text())


class Page(HTMLParser):
    """Its text, and all that could load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.sources, self.tags = "", [], set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs), "no scripts"
        self.tags.add(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text += " ".join(data.split()) + " "


def test_the_page_has_every_part_and_loads_and_runs_nothing_and_names_no_place(run_folder: Path) -> None:
    html = (run_folder / "report.html").read_text()
    page = Page(html)
    assert page.text.index("InduceKV (refined) − no memory") < page.text.index("Results")  # losses come first
    for part in (
        "InduceKV (refined), no relevance gate",
        "75.0 ± 0.0",
        "It opens <often>.",
        "learning_rates = [0.001]",
    ):
        assert part in page.text
    assert "python -m benchmarks.research.continual run --out out" in page.text
    assert "torch" in page.text
    assert "default-src 'none'" in html
    assert len(page.sources) == 2  # the matrices and the diagnostic
    assert all(source.startswith("data:image/png") for source in page.sources)
    assert not {"script", "link", "iframe", "object"} & page.tags
    for text in (html, (run_folder / "report.json").read_text()):
        assert str(run_folder.parent) not in text
        assert str(CHECKPOINT.parent) not in text


def test_text_of_the_data_stays_text(content: dict[str, Any]) -> None:
    name = '<script>alert(1)</script>"><img src=http://example.com onerror=x>'
    hostile = copy.deepcopy(content) | {"suite": name, "finding": name, "missing": [name]}
    hostile["diagnostics"][0] |= {"finding": name, "source": name}
    hostile["commands"][0]["command"] = name
    for run in hostile["runs"]:
        run["settings"]["steps"] = name
    page = Page(render_html(hostile))
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert "script" not in page.tags
    assert all(source.startswith("data:image/") for source in page.sources)


def test_the_page_of_the_json_file_is_the_page_of_the_folder(run_folder: Path, tmp_path: Path) -> None:
    shutil.copy(run_folder / "report.json", tmp_path / "copy.json")
    assert main(["report", "--from-json", str(tmp_path / "copy.json")]) == 0
    assert (tmp_path / "copy.html").read_text() == (run_folder / "report.html").read_text()
    (tmp_path / "copy.json").write_text('{"benchmark": "footprint"}')
    assert main(["report", "--from-json", str(tmp_path / "copy.json")]) == 2


@pytest.mark.parametrize("name", ["continual_full", "continual_decoupled", "real_text_comparison"])
def test_the_committed_json_files_still_make_a_page_with_their_numbers(name: str) -> None:
    content = read_file(RESULTS / f"{name}.json")
    text = Page(render_html(content)).text
    for row in content["results"]:
        ap = row["metrics"]["AP"]
        error = "" if ap["standard_error"] is None else f" ± {100 * ap['standard_error']:.1f}"
        assert f"{names.title(row['method'])} {100 * ap['mean']:.1f}{error}" in text


def test_the_json_file_holds_rows_differences_and_runs(content: dict[str, Any]) -> None:
    assert (content["suite"], content["missing"]) == ("demo", [])
    rows = {row["method"]: row for row in content["results"]}
    assert rows["refined"]["metrics"]["AP"] == {"mean": 0.875, "standard_error": 0.0}
    assert rows["lora_replay"]["tasks"]["guild"]["mean"] == 0.75
    differences = {(row["method"], row["against"]): row for row in content["differences"]}
    assert differences["refined", "no_memory"]["AP"]["mean"] == 0.75
    assert differences["refined", "lora_replay"]["tasks"]["digit"]["verdict"] == "less"
    assert differences["refined_no_gate", "refined"]["base_final"]["mean"] == round(-5 / 9, 4)
    (run, *_) = [run for run in content["runs"] if run["method"] == "refined"]
    assert run["base"] == [1.0, 1.0]
    assert "reports" not in run
    assert run["composition"] == [{"guild": 4}] * 2
    assert content["diagnostics"] == [SWEEPS]
    assert content["finding"] == "32 entries: InduceKV (refined) has the highest AP."
