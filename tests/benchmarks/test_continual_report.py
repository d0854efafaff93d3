"""The page and the JSON file of a hand-made folder: the demo world, two tasks, a few questions."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.continual.__main__ import main
from benchmarks.continual.report.command import write_report
from benchmarks.continual.report.commands import read_commands, record_command
from benchmarks.continual.report.content import read_folder, streams_of
from benchmarks.continual.report.page import render_html
from inducekv_vllm.errors import ConfigError
from server.demo import CHECKPOINT
from tests.benchmarks.conftest import DemoSuite
from tests.benchmarks.finished_runs import write_configuration, write_finished_run

SIZES = {"train": 4, "validation": 2, "test": 4}
ORDER = ("guild", "digit")
SCORES = ("AP", "AF", "base_final")
SWEEPS = {
    "diagnostic": "sweeps",
    "source": "Retrieval Quality",
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

OF_TASKS: Mapping[str, dict[str, Any]] = {
    "refined": {
        "activation": {"chosen": "text", "search": [{"nll": 1.23456}]},
        "composition": {"before": {}, "after": {"guild": 4}},
    },
    "lora_replay": {"rates_tried": {"0.001": 2.0, "0.1": None}},
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, demo_suite: DemoSuite) -> Path:
    """A finished run with one diagnostic and its report; not to be changed."""
    folder = tmp_path_factory.mktemp("run") / "out"
    data, suite = demo_suite(*SIZES.values(), *ORDER)
    for (method, (*rows, base)), seed in itertools.product(RIGHT.items(), (0, 1)):
        rights = [
            {task: [n < count for n in range(4)] for task, count in zip(ORDER, row, strict=False)}
            | {"base": [n < base for n in range(9)]}
            for row in rows
        ]
        write_finished_run(
            folder,
            method,
            rights,
            suite=suite,
            seed=seed,
            settings={"name": method, "steps": 7, "learning_rates": [0.001]},
            stored_bytes=[0 if method == "no_memory" else 1024] * 2,
            anchor_bytes=[10, 2048],
            seconds=[{"learn": 1.23456, "evaluate": 2.0}] * 2,
            reports=[{"history": [{"step": 0}]} | OF_TASKS.get(method, {})] * 2,
        )
    write_configuration(folder, data, suite, answer={"by": "http", "server": "own"})
    record_command(folder, ["python", "-m", "benchmarks.continual", "run", "--out", str(folder)])
    (folder / "diagnostics").mkdir()
    (folder / "diagnostics" / "sweeps.json").write_text(json.dumps(SWEEPS))
    write_report(folder)
    return folder


@pytest.fixture
def out(tmp_path: Path, run_folder: Path) -> Path:
    """A copy without the report, to be changed."""
    return Path(shutil.copytree(run_folder, tmp_path / "out", ignore=shutil.ignore_patterns("report.*")))


@pytest.fixture(scope="module")
def content(run_folder: Path) -> dict[str, Any]:
    return json.loads((run_folder / "report.json").read_text())


@pytest.fixture(scope="module")
def html(run_folder: Path) -> str:
    return (run_folder / "report.html").read_text()


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


class Page(HTMLParser):
    """Text by the id of its section ("" before the first), tags in order, and all that could load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.section, self.text, self.sources, self.tags = "", {"": ""}, [], []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert not any(name.startswith("on") for name in attributes), "no scripts"
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "data", "srcset")]
        if tag == "section":
            self.section = attributes["id"] or ""
            self.text[self.section] = ""

    def handle_data(self, data: str) -> None:
        self.text[self.section] += " ".join(data.split()) + " "


def test_the_page_opens_with_a_chart_a_table_and_a_short_paragraph(page, html, content):
    blocks = [tag for tag in page.tags if tag in ("figure", "table", "p", "section")]
    assert blocks[:4] == ["figure", "table", "p", "section"]
    assert blocks.count("table") > 8
    assert len(html) < 1_000_000
    summary = html.partition('<p class="summary open">')[2].partition("</p>")[0]
    assert summary == content["finding"]
    assert len(summary) < 6 * 105
    assert summary.startswith("InduceKV (refined) cannot be compared with gated LoRA + replay (32 entries), ties with ")
    assert "Highest AP: " in summary


def test_every_section_has_its_content(page):
    run = page.text["what-was-run"]
    assert "4 a task, 9 base questions" in run
    assert "by inducekv-serve over HTTP" in run
    assert "torch" in run
    assert "All methods are complete" in run
    assert "“Which guild owns" in page.text["the-tasks"]
    assert "no memory: “no_memory says”" in page.text["the-tasks"]
    assert "335,872" in page.text["what-the-bytes-buy-otherwise"]  # 32 entries of the demo model in float16
    assert "no relevance gate" in page.text["ablations"]
    diagnostics = page.text["diagnostics"]
    assert "Sweeps, InduceKV (refined), 32 entries. It opens <often>. (Source: Retrieval Quality)" in diagnostics
    assert "python -m benchmarks.continual run --out out" in page.text["commands"]
    assert "base retention" in page.text["terms"]
    for section in ("results", "task-by-task", "learning-and-forgetting", "cost", "settings"):
        assert page.text[section].strip()


def test_the_page_loads_and_runs_nothing_and_names_no_place(page, html, run_folder):
    assert "default-src 'none'" in html
    assert page.sources
    assert all(source.startswith("data:image/") for source in page.sources)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    for text in (html, (run_folder / "report.json").read_text()):
        assert str(run_folder.parent) not in text
        assert str(CHECKPOINT.parent) not in text


def test_text_of_the_data_stays_text(content, page):
    name = '<script>alert(1)</script>\x1b"><img src=http://example.com onerror=x>'
    hostile = copy.deepcopy(content) | {"suite": name, "finding": name, "missing": [name]}
    hostile["examples"][0] |= {"text": name, "expected": name, "answers": {name: name}}
    hostile["diagnostics"][0] |= {"finding": name, "source": name}
    hostile["commands"][0]["command"] = name
    for run in hostile["runs"]:
        run["settings"]["steps"] = name
    parsed = Page(render_html(hostile))
    expected = name.replace("\x1b", "\ufffd")
    assert set(parsed.tags) <= {*page.tags, "ul", "li"}
    assert all(source.startswith("data:image/") for source in parsed.sources)
    for section in ("", "what-was-run", "the-tasks", "cost", "settings", "diagnostics", "commands"):
        assert expected in parsed.text[section]


def test_the_page_of_the_json_file_is_the_page_of_the_folder(run_folder, html, tmp_path, capsys):
    copied = tmp_path / "copy.json"
    shutil.copy(run_folder / "report.json", copied)
    assert main(["report", "--from-json", str(copied)]) == 0
    assert (tmp_path / "copy.html").read_text() == html
    assert main(["report", "--from-json", str(copied), "--json", str(tmp_path / "other.json")]) == 2
    assert "--from-json writes the page only" in capsys.readouterr().err
    copied.write_text('{"benchmark": "footprint"}')
    assert main(["report", "--from-json", str(copied)]) == 2
    assert "not the JSON file of a report" in capsys.readouterr().err


def test_the_committed_page_belongs_to_the_committed_json_file():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    content = json.loads((results / "continual_full.json").read_text())
    text = (results / "continual_full.html").read_text()
    committed = Page(text)
    assert len(text.encode()) < 1_000_000
    assert content["finding"] in committed.text[""]
    assert all(source.startswith("data:image/") for source in committed.sources)
    for diagnostic in content["diagnostics"]:
        assert " ".join(diagnostic["finding"].split()) in committed.text["diagnostics"]


def test_the_json_file_holds_rows_differences_and_runs(content):
    assert (content["suite"], content["missing"]) == ("demo", [])
    rows = {row["method"]: row for row in content["results"]}
    assert rows["refined"]["metrics"]["AP"] == {"mean": 0.875, "standard_error": 0.0}
    assert rows["lora_replay"]["tasks"]["guild"]["mean"] == 0.75
    differences = {(row["method"], row["against"]): row for row in content["differences"]}
    assert differences["refined", "no_memory"]["AP"]["mean"] == 0.75
    assert differences["refined", "lora_replay"]["tasks"]["digit"]["verdict"] == "less"
    assert differences["refined_no_gate", "refined"]["base_final"]["mean"] == round(-5 / 9, 4)
    (run, *_) = [run for run in content["runs"] if run["method"] == "refined"]
    assert (run["base"], run["anchor_bytes"]) == ([1.0, 1.0], 2048)
    assert run["seconds"][0]["learn"] == 1.2346
    assert "reports" not in run
    assert run["composition"] == [{"guild": 4}] * 2
    assert run["tried"] == [{"activation": {"chosen": "text", "search": [{"nll": 1.2346}]}}] * 2
    (lora, *_) = [run for run in content["runs"] if run["method"] == "lora_replay"]
    assert lora["tried"] == [{"rates_tried": {"0.001": 2.0, "0.1": None}}] * 2
    assert "composition" not in lora
    (untouched, *_) = [run for run in content["runs"] if run["method"] == "no_memory"]
    assert not {"tried", "composition"} & set(untouched)
    assert content["diagnostics"] == [SWEEPS]


def test_accuracies_of_the_json_file_get_their_digits_back(content):
    """Four digits are kept of 5 of 9 base questions."""
    (stored, _) = [run for run in content["runs"] if run["method"] == "lora_replay"]
    assert stored["base"] == [0.5556, 0.5556]
    (run, _) = [run for run in streams_of(content).runs if run["method"] == "lora_replay"]
    assert run["base"] == [5 / 9, 5 / 9]
    assert run["metrics"]["base_final"] == 5 / 9
    without_counts = streams_of(content | {"examples": []}).of("lora_replay", 32)[0]
    assert without_counts["base"] == stored["base"]


def test_an_unfinished_folder_is_reported_with_what_is_missing(out, capsys):
    path = out / "lora_replay" / "budget-32" / "seed-1" / "matrix.json"
    matrix = json.loads(path.read_text())
    matrix |= {"complete": False, "accuracy": matrix["accuracy"][:1], "base": matrix["base"][:1]}
    path.write_text(json.dumps(matrix))
    files = ["--html", str(out / "a" / "page.html"), "--json", str(out / "a" / "all.json")]
    assert main(["report", "--out", str(out), *files]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["missing"] == ["lora_replay, budget 32, seed 1: 1 of 2 tasks done; not counted."]
    page = Page((out / "a" / "page.html").read_text())
    assert "seed 1: 1 of 2 tasks done" in page.text["what-was-run"]
    assert "1, without 1" in page.text["results"]
    assert not (out / "report.html").exists()


def test_other_data_are_not_shown_as_the_runs(run_folder, demo_suite):
    tasks = Page(render_html(read_folder(run_folder, data=demo_suite(4, 2, 3)[0]))).text["the-tasks"]
    assert "cannot be shown" in tasks
    assert "not the data of the run" in tasks


def test_searched_settings_are_listed(out, tmp_path):
    trials = [
        {"settings": {"learning_rates": [rate]}, "AP": ap, "base_final": 0.5, "seconds": 3.0}
        for rate, ap in ((0.001, 0.625), (0.002, 0.5))
    ]
    tuned = {"search": {"tasks": ["guild"]}, "digest": "d", "methods": {}}
    tuned["methods"]["lora_replay"] = {"settings": {"learning_rates": [0.001]}, "trials": trials}
    tuned["methods"]["refined"] = {"settings": {"steps": 9}, "trials": [{**trials[0], "settings": {"steps": 9}}]}
    tuned["methods"]["ewc"] = {"settings": {}, "trials": []}
    (tmp_path / "tuned.json").write_text(json.dumps(tuned))
    write_report(out, tuned=tmp_path / "tuned.json")
    settings = Page((out / "report.html").read_text()).text["settings"]
    assert "LoRA + replay learning_rates = [0.001] 62.5 50.0 3 used here" in settings
    assert "InduceKV (refined) steps = 9 62.5 50.0 3 this run used others" in settings
    assert "EWC" not in settings


def test_a_diagnostic_that_cannot_be_drawn(content):
    broken = content | {"diagnostics": [{name: value for name, value in SWEEPS.items() if name != "defaults"}]}
    with pytest.raises(ConfigError, match="diagnostic 'sweeps' cannot be drawn"):
        render_html(broken)
    unknown = content | {"diagnostics": [SWEEPS | {"diagnostic": "of_another_version"}]}
    assert "Of another version, InduceKV (refined)" in Page(render_html(unknown)).text["diagnostics"]


def test_a_folder_of_nothing_or_with_another_model_is_refused(out, tmp_path, capsys):
    assert main(["report", "--out", str(tmp_path / "nowhere")]) == 2
    assert "not the folder of a run" in capsys.readouterr().err
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_bytes((out / "run.json").read_bytes())
    assert main(["report", "--out", str(tmp_path / "begun")]) == 2
    assert "no task of any stream is done yet" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is of the model 'checkpoint': name its folder with --model"):
        write_report(out, tmp_path)
    (out / "diagnostics" / "odd.json").write_text("[]")
    assert main(["report", "--out", str(out)]) == 2
    assert "odd.json: not what a diagnostic writes" in capsys.readouterr().err


def test_commands_are_kept_once_and_without_their_places(tmp_path):
    for _ in range(2):
        record_command(tmp_path, ["python", "-m", "x", "--out", str(tmp_path / "a b"), "--seed", "0"])
    record_command(tmp_path, ["python", "-m", "x", "--out", "here/it/is"])
    first, second = read_commands(tmp_path)
    assert first["command"] == "python -m x --out 'a b' --seed 0"
    assert second["command"] == "python -m x --out here/it/is"
    assert first["machine"]["versions"]["torch"]
    (tmp_path / "commands.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="not a list of commands"):
        read_commands(tmp_path)
