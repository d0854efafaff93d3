"""`inducekv-select` and `selector.teach` refuse the same inputs, with the same errors."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import selector
from inducekv_vllm.bundle import read_bundle, with_metadata, write_bundle
from inducekv_vllm.errors import BundleError, ConfigError, FingerprintMismatch, InduceKVError, TaskDataError
from selector.backbone.model import Backbone
from selector.cli.select import run
from selector.cli.settings import parse_arguments
from selector.data.anchors import AnchorStore
from selector.gate.background import everyday_requests
from tests.unit.selector.conftest import questions_about, record, write_task
from tests.unit.selector.stream import Stream

SMALL = {"steps": 2, "batch_size": 4, "learning_rate": 0.05, "payload_tokens": 2, "budget": 2}


@dataclass(frozen=True)
class Case:
    """What is given in place of a good request, and how both faces refuse it."""

    error: type[InduceKVError]
    message: str  # what both messages hold
    given: Mapping[str, Any] = field(default_factory=dict)  # files by the names that `files` gives them
    settings: Mapping[str, Any] = field(default_factory=dict)
    after: str | None = None  # a bundle


CASES = {
    "validation is training": Case(TaskDataError, "is also a training example", {"validation": "counts"}),
    "some of validation is training": Case(TaskDataError, "is also a training example", {"validation": "shared"}),
    "validation of another task": Case(TaskDataError, "is of the task 'places'", {"validation": "places"}),
    "base is the task's": Case(TaskDataError, "'counts0' is also a question of the task 'counts'", {"base": "counts"}),
    "base is an earlier task's": Case(
        TaskDataError, "is also a question of the task 'colours'", {"base": "colours"}, after="colours"
    ),
    "background is the task's": Case(ConfigError, "is also a question of the task", {"background": "counts"}),
    "background is missing": Case(TaskDataError, "cannot read the task data", {"background": "nowhere"}),
    "no examples": Case(TaskDataError, "holds no examples", {"task": "empty"}),
    "no validation examples": Case(TaskDataError, "holds no examples", {"validation": "empty"}),
    "one example": Case(TaskDataError, "a tenth is held out for validation", {"task": "one"}),
    "no answer": Case(TaskDataError, "answer", {"task": "unanswered"}),
    "an empty answer": Case(TaskDataError, "'counts3' of task 'counts' has an empty answer", {"task": "silent"}),
    "an empty answer in validation": Case(TaskDataError, "has an empty answer", {"validation": "silent_places"}),
    "an id twice": Case(TaskDataError, "'counts0' occurs more than once", {"task": "twice"}),
    "several tasks": Case(TaskDataError, "one task at a time", {"task": "mixed"}),
    "a text that stands for a picture": Case(TaskDataError, "more <image> marks than images", {"task": "marked"}),
    "longer than the context": Case(TaskDataError, "example 'e1' of task 'colours' has", {"task": "long"}),
    "no file": Case(TaskDataError, "cannot read the task data", {"task": "nowhere"}),
    "a pipe": Case(TaskDataError, "not a regular file", {"task": "pipe"}),
    "a pipe of base questions": Case(TaskDataError, "not a regular file", {"base": "pipe"}),
    "a pipe of background requests": Case(TaskDataError, "not a regular file", {"background": "pipe"}),
    "questions that are everyday requests": Case(ConfigError, "are everyday requests", {"task": "chat"}),
    "questions of an earlier task": Case(
        ConfigError, "the tasks 'colours' and 'again' have", {"task": "again"}, after="colours"
    ),
    "learned already": Case(
        TaskDataError, "already holds the task 'colours'", {"task": "colours", "base": "base"}, after="colours"
    ),
    "no anchors": Case(ConfigError, "no anchors of the task 'colours'", {"anchors": "none"}, after="colours"),
    "no room": Case(ConfigError, "the budget of 1 entries does not hold 1", settings={"budget": 1}, after="colours"),
    "no budget": Case(
        ConfigError, "budget: Input should be greater than or equal to 1 (found 0)", settings={"budget": 0}
    ),
    "too large a budget": Case(
        ConfigError,
        "budget: Input should be less than",
        settings={"budget": 99999999999},
    ),
    "no entries": Case(ConfigError, "entries_per_task: Input should be", settings={"entries_per_task": 0}),
    "a seed out of range": Case(ConfigError, f"seed: Input should be less than {2**63}", settings={"seed": 2**63}),
    "all questions missed": Case(ConfigError, "gate_misses: Input should be", settings={"gate_misses": 0.51}),
    "no number": Case(ConfigError, "learning_rate: Input should be a finite number", settings={"learning_rate": "nan"}),
    "a weighting of the other recipe": Case(
        ConfigError, "weighting: Input should be 'prior' or 'uniform' (found 'sqrt')", settings={"weighting": "sqrt"}
    ),
    "a setting of the other recipe": Case(ConfigError, "gamma", settings={"gamma": 0.1}),
    "an unknown setting": Case(ConfigError, "stepz", settings={"stepz": 3}),
    "maps of too high a rank": Case(
        ConfigError, "a map of width 128 has at most that rank", settings={"map_rank": 129}
    ),
    "merged memory with maps": Case(
        ConfigError, "merged memory has no maps", settings={"form": "merged", "map_rank": 2}
    ),
    "another form": Case(
        BundleError, "refined for the form 'decoupled', found 'merged'", settings={"form": "merged"}, after="colours"
    ),
    "other payloads": Case(
        BundleError, "2 payload tokens an entry, found 3", settings={"payload_tokens": 3}, after="colours"
    ),
    "other maps": Case(BundleError, "maps of rank 8, found 2", settings={"map_rank": 2}, after="colours"),
    "the other recipe's bundle": Case(
        BundleError,
        "made by the recipe 'paper', which the recipe 'refined' cannot continue",
        settings={"weighting": "uniform"},
        after="built",
    ),
    "another model": Case(
        FingerprintMismatch, "the previous bundle was made for another backbone", {"model": "qwen3-vl"}, after="colours"
    ),
    "no model": Case(InduceKVError, "nowhere", {"model": "nowhere"}),
    "a folder as output": Case(ConfigError, "is a folder, expected the name of a file", {"output": "folder"}),
    "an output that cannot be made": Case(
        ConfigError, "the folder /dev/null cannot be made: /dev/null is no folder", {"output": "null"}
    ),
}


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, model_folders: dict[str, Path], tasks: dict[str, Path]
) -> dict[str, Path]:
    """Models, task data, bundles and stores of anchors by name; "nowhere" is not there."""
    root = tmp_path_factory.mktemp("refusals")
    silent, marked, silent_places = (questions_about("counts", "How many rings?") for _ in range(3))
    for lines in (silent, silent_places):
        lines[3]["answer"] = " "
    marked[3]["messages"][0]["content"][1]["text"] = "What does <image> stand for?"
    chat, everyday = questions_about("chat", ""), [each.text for each in everyday_requests() if not each.picture]
    for line, text in zip(chat, everyday, strict=False):
        line["messages"][0]["content"] = text
    counts, others = (_lines(tasks[name]) for name in ("counts", "places"))
    unanswered = [{name: value for name, value in line.items() if name != "answer"} for line in counts]
    made = {
        "shared": [*(line | {"task": "counts"} for line in others[:3]), counts[5] | {"id": "again"}],
        "empty": [],
        "one": counts[:1],
        "unanswered": [{"prompt": line["id"]} for line in unanswered],
        "silent": silent,
        "silent_places": silent_places,
        "marked": marked,
        "twice": [*counts, counts[0]],
        "mixed": [*counts[:6], *others[:6]],
        "long": [record(0), record(1, answer="word " * 5000), record(2)],
        "chat": chat,
        "again": questions_about("again", "What colour is the circle?"),  # about the same pictures
    }
    found = {name: write_task(root / name, lines) for name, lines in made.items()}
    os.mkfifo(root / "pipe.txt")
    found |= (
        tasks | model_folders | {"folder": root, "pipe": root / "pipe.txt", "null": Path("/dev/null/next.safetensors")}
    )
    found |= {name: root / name for name in ("nowhere", "none")}
    stream = Stream(root, model_folders["llava"], tasks, options=(*_flags(SMALL), "--allow-worse"))
    stream.update("colours", "--facts", "off", "--anchors", str(root / "anchors"))
    built = with_metadata(read_bundle(stream.output("colours")), recipe="paper")
    write_bundle(built, stream.output("built"))
    anchors = AnchorStore(root / "anchors")
    return found | {
        "after colours": stream.output("colours"),
        "after built": stream.output("built"),
        "anchors": anchors.folder,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def by_command(files: dict[str, Path], given: dict[str, str], settings: dict[str, Any], output: Path) -> None:
    paths = {name: files[of] for name, of in given.items()}
    options = {"output": output} | paths
    if "previous" in given:
        options = {"anchors": files["anchors"], **options, "recipe": "refined"}
    run(*parse_arguments(_flags(options | settings)))


def by_python(files: dict[str, Path], given: dict[str, str], settings: dict[str, Any], output: Path) -> None:
    paths: dict[str, Any] = {name: files[of] for name, of in given.items()}
    for name in ("task", "validation"):
        if given.get(name) == "empty":
            paths[name] = []
    store = AnchorStore(paths.pop("anchors", files["anchors"]))
    previous = paths.pop("previous", None)
    before = None if previous is None else selector.Taught(read_bundle(previous), {}, tuple(store.read()))
    model, examples = paths.pop("model"), paths.pop("task")
    selector.teach(model, examples, previous=before, **({"output": output} | paths | settings))


@pytest.mark.parametrize("teach", [by_command, by_python])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_both_refuse(
    files: dict[str, Path],
    case: Case,
    teach: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(*_: object) -> None:
        raise AssertionError("a training step was taken")

    monkeypatch.setattr("selector.refined.training.Training.take_step", train)
    given = {"model": "llava", "task": "counts", **case.given}
    if case.after:
        given["previous"] = f"after {case.after}"
    with pytest.raises(case.error) as refused:
        teach(files, given, {**SMALL, **case.settings}, tmp_path / "next.safetensors")
    assert case.message in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("teach", [by_command, by_python])
def test_nothing_that_needs_no_model_waits_for_one(
    files: dict[str, Path], teach: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Backbone, "load", load)
    early = ["validation is training", "base is the task's", "background is the task's", "no examples", "no room"]
    early += ["background is missing", "questions that are everyday requests", "questions of an earlier task"]
    for name in early:
        test_both_refuse(files, CASES[name], teach, tmp_path, monkeypatch)
