"""The measurement of the relevance gate: its questions, its table, and the whole of it on the demo model."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.demo.streams import SEARCH_STREAMS
from benchmarks.demo.world import examples as demo_examples
from benchmarks.research.continual.suites import Suite
from benchmarks.research.continual.suites.made import load_demo, load_real_text
from benchmarks.research.gate.__main__ import main
from benchmarks.research.gate.asking import ANCHORS, Asked, protocol_questions, questions_at_the_end
from benchmarks.research.gate.protocol import LONG_WAYS, STYLES, WAYS
from benchmarks.research.gate.table import OPENED, ROUTED, Miss, Share, rows_of
from benchmarks.research.gate.wordings import read_lists, reworded
from benchmarks.research.real_pictures import stream
from benchmarks.research.real_pictures.tasks import TASKS as PICTURE_TASKS
from selector.gate import fitting_set
from selector.gate.variations import text_of
from tests.research.conftest import DemoSuite
from tests.research.made_up_icons import made_up_concepts, save_icons
from tests.unit.benchmarks.made_up_packages import MadeUp

ORDER = ("guild", "digit")
SIZES = {"train": 8, "validation": 4, "test": 6}
BASE_SIZES = {"train": 90, "validation": 9, "test": 9}


# Other wordings


@pytest.fixture
def suites(demo_suite: DemoSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Some test questions of every task of every suite; nothing is drawn for those about pictures."""
    text = load_real_text(tmp_path / "text", SIZES, SIZES, MadeUp())
    demo_tasks = demo_suite(4, 1, 6)[1].tasks
    asked = {task.name: [text_of(e.messages) for e in task.test] for task in (*demo_tasks, *text.tasks)}
    monkeypatch.setattr(stream, "drawing", lambda icons, name: Image.new("RGBA", (64, 64)))
    concepts = made_up_concepts(save_icons(tmp_path / "icons"))
    drawn = {name: demo_examples(name, "test", 6) for name in SEARCH_STREAMS}
    drawn |= {name: stream.examples(name, "test", 6, concepts, MadeUp()) for name in PICTURE_TASKS}
    return asked | {name: [r["messages"][0]["content"][-1]["text"] for r, _ in of] for name, of in drawn.items()}


def test_every_question_of_every_task_has_other_wordings(suites: dict[str, list[str]]) -> None:
    assert len(suites) == 8 + 7 + 10 + 4
    for task, asked in suites.items():
        for question in asked:
            wordings = {reworded(task, question, number) for number in range(12)}
            assert None not in wordings, (task, question)
            assert question not in wordings
            assert len(wordings) > 1


# The questions


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo world, with a few more base questions to fit gates to than elsewhere; not to be changed."""
    folder = tmp_path_factory.mktemp("data")
    load_demo(folder, {"train": 70, "validation": 4, "test": 5}, BASE_SIZES)
    return folder


@pytest.fixture(scope="module")
def suite(data: Path) -> Suite:
    return load_demo(data).ordered(ORDER)


def test_each_test_question_is_asked_in_every_way(suite: Suite) -> None:
    asked = list(protocol_questions(suite, 5))
    for task in ORDER:
        own = [q.kind for q in asked if q.task == task]
        for kind in (*WAYS, "after examples", "another picture style", "two pictures", "no picture"):
            assert own.count(kind) == (2 if kind in LONG_WAYS else 5), kind
        assert sum(kind.startswith("other wording") for kind in own) == 5
    of_none = [q.kind for q in asked if q.task is None]
    assert set(of_none) == {*OPENED, "other languages"}
    assert of_none.count("base") == of_none.count("base, wrapped") == 5
    lists = read_lists()
    near = of_none.count("near-misses") + of_none.count("near-misses, a word shared")
    assert near == sum(len(lists.near_misses["demo"][task]) for task in ORDER)
    assert all(q.style in STYLES for q in asked if q.kind == "another picture style")
    two = next(q for q in asked if q.kind == "two pictures")
    assert len(two.images) == 2
    assert text_of(two.messages) in {text_of(e.messages) for e in suite.tasks[0].test}


def test_a_gate_knows_anchors_of_earlier_tasks_and_all_of_the_last(suite: Suite) -> None:
    one, other = (questions_at_the_end(suite, seed) for seed in (0, 1))
    first, last = suite.tasks
    assert list(one) == list(ORDER)
    assert len(one["guild"]) == ANCHORS
    assert {e.id for e in one["guild"]} <= {e.id for e in first.train}
    assert one["guild"] != other["guild"]
    assert one["digit"] == other["digit"] == [*last.train, *last.validation]


# The table


def of_task(kind: str, *routed: str | None, task: str = "a") -> list[Asked]:
    return [Asked(kind, task, to, None if to else "below_threshold") for to in routed]


def test_the_table_against_one_that_was_counted_by_hand() -> None:
    one = [
        *of_task("plain", "a", "a", "a", "b"),
        *of_task("plain", "b", None, task="b"),
        *of_task("capitals", None),
        *(Asked("base", None, to, "outside" if to is None else None) for to in ("b", None, None, None)),
    ]
    other = [
        *of_task("plain", "a", "a", "a", "a"),
        *of_task("plain", "b", "b", task="b"),
        *of_task("capitals", "a"),
        *(Asked("base", None, None, closed) for closed in ("outside", "outside", "outside", "below_threshold")),
    ]
    plain, capitals, base = rows_of([one, other])
    assert (plain.kind, plain.asked, capitals.asked, base.asked) == ("plain", 6, 1, 4)
    assert plain.shares == {
        "routed": Share(pytest.approx(5 / 6), pytest.approx(4 / 6), 1.0),
        "another_task": Share(pytest.approx(1 / 12), 0.0, pytest.approx(1 / 6)),
        "outside": Share(0.0, 0.0, 0.0),
        "below_threshold": Share(pytest.approx(1 / 12), 0.0, pytest.approx(1 / 6)),
    }
    assert (plain.by_task["a"]["routed"], plain.by_task["b"]["routed"]) == (7 / 8, 3 / 4)
    assert plain.goals == {"routed": 0.98, "another_task": 0.01}
    assert plain.misses == [
        Miss("routed", 0.98, pytest.approx(0.98 - 5 / 6), {"b": 3 / 4, "a": 7 / 8}),
        Miss("another_task", 0.01, pytest.approx(1 / 12 - 0.01), {"a": 1 / 8}),
    ]
    assert capitals.shares["routed"] == Share(0.5, 0.0, 1.0)
    assert (capitals.goals, capitals.misses) == ({}, [])
    assert base.shares == {
        "opened": Share(0.125, 0.0, 0.25),
        "outside": Share(0.75, 0.75, 0.75),
        "below_threshold": Share(0.125, 0.0, 0.25),
    }
    assert base.misses == [Miss("opened", 0.02, pytest.approx(0.105), {"b": 0.125})]


# The whole of it


@pytest.fixture(scope="module")
def measured(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """A gate of two tasks that was fitted to fewer requests; what was written, and what was printed."""
    out = tmp_path_factory.mktemp("gate") / "gate.json"
    command = ["--suite", "demo", "--data", str(data), "--order", *ORDER, "--seed", "0", "--tests", "5"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        for name, count in {"REQUESTS": 300, "NEAR_MISSES": 20, "NOISE": 60}.items():
            patch.setattr(fitting_set, name, count)
        assert main([*command, "--out", str(out)]) == 0
    return json.loads(out.read_bytes()), printed.getvalue()


@pytest.mark.slow
def test_every_row_is_there_and_a_sane_gate_is_measured(measured: tuple[dict[str, Any], str]) -> None:
    result, printed = measured
    rows = {row["kind"]: row for row in result["rows"]}
    assert rows.keys() >= {*ROUTED, *OPENED, *WAYS}
    shares = {kind: {name: share["mean"] for name, share in row["shares"].items()} for kind, row in rows.items()}
    assert shares["plain"]["routed"] >= 0.9
    assert shares["wrapped"]["routed"] >= 0.8
    assert shares["base"]["opened"] <= 0.1
    assert shares["noise"]["opened"] <= 0.1
    for kind, found in shares.items():
        assert sum(found.values()) == pytest.approx(1), kind
    (gate,) = result["gates"]
    assert gate["tasks"] == list(ORDER)
    assert gate["bytes"] > 0
    assert gate["seconds"].keys() == {"features", "training"}
    assert result["machine"]["cores"] >= 1
    assert f"gate of seed 0: 2 tasks, {gate['bytes']} bytes, features " in printed
    for row in result["rows"]:
        for miss in row["misses"]:
            assert f"missed: {row['kind']}: {miss['measure'].replace('_', ' ')}" in printed
