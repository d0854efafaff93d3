"""`python -m benchmarks.research.score` on every task of every suite in tiny files, and on bad predictions."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.research.published import rows
from benchmarks.research.published.scorers import captions, next_qa
from benchmarks.research.published.suites import SUITES
from benchmarks.research.published.suites.llava import TYPES
from benchmarks.research.published.suites.vqacl import NEXT_TYPES
from benchmarks.research.score import main
from tests.research.published import tiny_suites as tiny


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each suite's name."""
    folder = tmp_path_factory.mktemp("suites")
    tiny.write_ucit(folder / "ucit")
    tiny.write_coin(folder / "coin")
    tiny.write_vqa10(folder / "vqa10", TYPES)
    tiny.write_vqacl(folder / "vqacl", TYPES)
    tiny.write_next_qa(folder / "nextqa", NEXT_TYPES)
    tiny.write_domain(folder / "domain")
    tiny.write_liit(folder / "liit")
    return folder


@pytest.fixture(autouse=True)
def without_java_or_wordnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captions, "has_java", lambda: False)
    monkeypatch.setattr(next_qa, "wordnet_similarity", lambda a, b: float(a == b))


def run(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> dict[str, Any]:
    assert main(arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def options(data: Path, suite: str, task: str, predictions: Path) -> list[str]:
    return ["--suite", suite, "--task", task, "--data", str(data / suite), str(predictions)]


EVERY = [(suite.name, task.name) for suite in SUITES.values() for task in suite.tasks]


@pytest.mark.parametrize(("suite", "task"), EVERY)
def test_right_answers_are_right(
    suite: str, task: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for a box, whose last digit the published script cuts off."""
    known = SUITES[suite].task(task)
    questions = known.questions(SUITES[suite].files(known, data / suite))
    texts = [(question.id, question.answers[0]) for question in questions]
    if task == "RefCOCO":
        texts = [(question.id, "[0.0, 0.0, 0.5, 0.5]") for question in questions]
    path = tiny.write_predictions(tmp_path / "predictions.jsonl", texts)
    found = run(capsys, options(data, suite, task, path))
    assert {name: found[name] for name in ("suite", "task", "questions", "missing")} == {
        "suite": suite,
        "task": task,
        "questions": len(questions),
        "missing": 0,
    }
    for mode in ("published", "corrected"):
        name, value = next(iter(found[mode].items()))
        if name == "bleu4" and suite == "liit" and mode == "published":
            assert value == pytest.approx(1)  # a fraction, beside percentages
        elif name in ("average", "cider"):
            assert value > 100
        else:
            assert value == pytest.approx(100), name


def test_the_example_of_the_documentation(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_predictions(tmp_path / "p", [("q0", "[0.10,0.25,0.40,0.59]"), ("q1", "[0.50,0.10,0.90,0.60].")])
    details = tmp_path / "details.jsonl"
    found = run(capsys, [*options(data, "coin", "grounding", path), "--details", str(details)])
    assert found["published"] == {"accuracy": 50.0}  # 0.59 becomes 0.5: an IoU of exactly one half
    assert found["corrected"] == {"accuracy": 100.0}
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    assert [(line["question_id"], line["published"], line["corrected"]) for line in lines] == [
        ("q0", 0, 1),
        ("q1", 1, 1),
    ]
    only = run(capsys, [*options(data, "coin", "grounding", path), "--mode", "corrected", "--boxes", "picture"])
    assert "published" not in only


def test_missing_predictions_are_named_and_wrong(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write_predictions(tmp_path / "p", [("q0", "red")])
    assert main(options(data, "coin", "VQAv2", path)) == 0
    text = capsys.readouterr().out
    assert "2 questions, 1 without a prediction, the first is q1" in text
    assert json.loads(text.splitlines()[-1])["published"] == {"accuracy": 100.0}
    assert json.loads(text.splitlines()[-1])["corrected"] == {"accuracy": 50.0}


def test_a_runs_predictions_are_scored_again(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the other mode, say: only the lines of the task count."""
    lines = [{"task": "VQAv2", "id": "q0", "answer": "Red."}, {"task": "VQAv2", "id": "q1", "answer": "blue"}]
    lines.append({"task": "VizWiz", "id": "q0", "answer": "red", "score": 1.0})
    (tmp_path / "p").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run(capsys, options(data, "coin", "VQAv2", tmp_path / "p"))
    assert (found["published"], found["corrected"]) == ({"accuracy": 50.0}, {"accuracy": 100.0})


def test_a_published_script_that_stops(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_predictions(tmp_path / "p", [("t1", "left lung"), ("t0", "no")])
    found = run(capsys, options(data, "domain", "vqa_rad", path))
    assert "in their order" in found["published"]["stops"]
    assert found["corrected"]["closed_accuracy"] == 100
    assert main([*options(data, "domain", "vqa_rad", path), "--mode", "published"]) == 2


def test_another_publishers_script(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_predictions(tmp_path / "p", [("q0", "A")])
    arguments = options(data, "coin", "ScienceQA", path)
    assert run(capsys, arguments)["published"]["accuracy"] == 50
    assert run(capsys, [*arguments, "--publisher", "hide"])["published"]["accuracy"] == 100
    assert main([*arguments, "--publisher", "nobody"]) == 2
    assert "expected the scorer of coin or hide, found 'nobody'" in capsys.readouterr().err


WITHOUT_SUITES = """
import sys
sys.modules |= dict.fromkeys(("nltk", "pycocoevalcap", "rapidfuzz", "sacrebleu"))  # importing them raises
from benchmarks.research.score import main
sys.exit(main())
"""


@pytest.mark.parametrize(("suite", "task", "lacks"), [("coin", "VQAv2", None), ("domain", "chart2table", "rapidfuzz")])
def test_without_the_extra_of_the_suites(suite: str, task: str, lacks: str | None, data: Path, tmp_path: Path) -> None:
    """What needs none of its packages is scored; for the rest one line says what to install."""
    known = SUITES[suite].task(task)
    asked = known.questions(SUITES[suite].files(known, data / suite))
    path = tiny.write_predictions(tmp_path / "p", [(question.id, f"{question.answers[0]} x") for question in asked])
    command = [sys.executable, "-c", WITHOUT_SUITES, *options(data, suite, task, path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if lacks is None:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        said = f"{known.name} of {suite} is scored with the package {lacks}: pip install '.[suites]'\n"
        assert (done.returncode, done.stderr) == (2, said)


def test_every_layout_of_ucit(data: Path, tmp_path: Path) -> None:
    at = data / "ucit" / "instructions"
    for parent, clevr, test in (("", "CLEVR-Math", "test_3000.json"), ("UCIT", "CLEVR-Math", "test.json")):
        folder = tmp_path / parent / clevr
        folder.mkdir(parents=True)
        (folder / test).write_bytes((at / "CLEVR" / "test_3000.json").read_bytes())
        task = SUITES["ucit"].task("clevr")
        assert len(task.questions(SUITES["ucit"].files(task, tmp_path))) == 2


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", "the file holds no predictions"),
        ("{", "line 1: malformed JSON"),
        ("[1]", "line 1: expected an object with question_id and text"),
        ('{"question_id": "q0"}', "line 1: expected text or answer, found question_id"),
        ('{"question_id": "q9", "text": "x"}', "1 predictions are of no question, the first of 'q9'"),
        ('{"question_id": "q0", "text": "x"}\n' * 2, "1 questions have more than one prediction, the first is 'q0'"),
        ("x" * (rows.MAX_LINE_BYTES + 1), "line 1: longer than"),
    ],
)
def test_bad_predictions(
    lines: str, problem: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p").write_text(lines)
    details = tmp_path / "details"
    assert main([*options(data, "coin", "VQAv2", tmp_path / "p"), "--details", str(details)]) == 2
    assert problem in capsys.readouterr().err
    assert not details.exists()
