"""Published suites as streams: from a folder of tiny files to the page, in this process."""

import json
import pickle
from pathlib import Path

import pytest

from benchmarks.research.continual.__main__ import main
from benchmarks.research.continual.suites import LoadOptions, load_suite
from benchmarks.research.published import check
from benchmarks.research.published.scorers import captions
from inducekv_vllm.errors import ConfigError
from tests.research.published import tiny_suites as tiny
from tests.research.published.tiny_suites import WRITERS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suites")
    for name, (write, root) in WRITERS.items():
        write(folder / name)
        tiny.write_pictures(folder / name, root)
    return folder


@pytest.fixture(autouse=True)
def without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captions, "has_java", lambda: False)


@pytest.mark.parametrize(("name", "scoring"), [*((name, "published") for name in WRITERS), ("coin", "corrected")])
def test_from_a_folder_to_the_page(name: str, scoring: str, data: Path, tmp_path: Path) -> None:
    """Two tasks of each, learned with LoRA and answered by the demo model."""
    suite = load_suite(name, data / name)
    chosen = {
        "ucit": ["VizWiz-Caption", "IconQA"],
        "coin": ["Grounding", "TextVQA"],
        "domain": ["vqa_rad", "chart2table"],
    }
    order = chosen.get(name, [task.name for task in suite.tasks[:2]])
    learning = ["--method", "no_memory", "lora", "--set", "steps=2", "--answer", "offline", "--jobs", "1"]
    places = ["--data", str(data / name), "--out", str(tmp_path / "out"), "--scoring", scoring]
    assert main(["run", "--suite", name, "--order", *order, *learning, *places, "--test-limit", "2"]) == 0
    configuration = json.loads((tmp_path / "out" / "run.json").read_bytes())
    assert (configuration["scoring"], configuration["new_tokens"]) == (scoring, suite.new_tokens)
    matrix = json.loads((tmp_path / "out" / "lora" / "budget-32" / "seed-0" / "matrix.json").read_bytes())
    assert matrix["complete"]
    assert suite.metrics.keys() <= matrix["metrics"].keys()
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(metric in page for metric in suite.metrics)
    assert "The paper&#39;s figures" in page or "The paper's figures" in page


def test_right_answers_get_the_suites_own_score(data: Path) -> None:
    suite = load_suite("ucit", data / "ucit")
    by_name = {task.name: task for task in suite.tasks}
    icons, photos = by_name["IconQA"].test, by_name["Flickr30k"].test
    assert suite.score("IconQA", icons, ["Tree", "boat."]).questions == (1.0, 0.0)
    corrected = load_suite("ucit", data / "ucit", LoadOptions("corrected"))
    assert corrected.score("IconQA", icons, ["Tree", "boat."]).questions == (1.0, 1.0)
    cider = suite.score("Flickr30k", photos, [example.answer for example in photos])
    assert cider.value > 1  # the average of seven has no upper bound, and nothing rounds it
    assert pickle.loads(pickle.dumps(suite)).digest() == suite.digest()


def test_ids_repeat_in_training_files_and_prompts_lose_their_marks(data: Path, tmp_path: Path) -> None:
    tiny.write_ucit(tmp_path)
    rows = [tiny.taught_row(1, "VizWiz/a.png", answer) for answer in ("a dog", "a cat", "a bus")]
    tiny.write(tmp_path / "instructions" / "VizWiz" / "train.json", rows)
    tiny.write_pictures(tmp_path, "datasets")
    task = next(task for task in load_suite("ucit", tmp_path).tasks if task.name == "VizWiz-Caption")
    assert [example.id for example in task.train] == ["t1", "t1#2", "t1#3"]
    parts = task.train[0].messages[0]["content"]
    assert [part["type"] for part in parts] == ["image", "text"]
    assert "<image>" not in parts[1]["text"]
    held = load_suite("ucit", tmp_path).with_validation()
    assert [len(task.validation) for task in held.tasks] == [1] * 6
    assert len(load_suite("ucit", tmp_path, LoadOptions(train_limit=1)).tasks[2].train) == 1


@pytest.mark.parametrize("name", ["liit", "nextqa"])
def test_suites_that_cannot_be_learned_say_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"suite '{name}' cannot be learned here: .*`benchmarks.research.score` scores it"
    ):
        load_suite(name, tmp_path)


@pytest.mark.parametrize("name", WRITERS)
def test_counts_from_disk(name: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--suite", name, "--data", str(data / name)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["lacking"] == 0
    assert all(task["train"] and task["test"] for task in found["tasks"])
