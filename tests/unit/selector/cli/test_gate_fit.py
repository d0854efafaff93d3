"""`inducekv-bundle gate-fit`: another gate, and everything else as it was."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import Bundle, Gate, read_bundle
from selector.backbone.model import Backbone
from selector.data.examples import read_task
from selector.gate.background import read_background
from selector.gate.data import GateData
from selector.gate.fit import fit_gate
from selector.gate.settings import GateOptions
from tests.bundles import classified_gate, random_bundle, random_gate
from tests.gates import bundle_behind
from tests.task_data import questions_about, record, write_task
from tests.tiny_families import FAMILIES
from tests.unit.selector.cli.bundle_command import command, refuse, written


@pytest.fixture(scope="module")
def gate(llava: Backbone) -> Gate:
    """Of two tasks, fitted to nothing."""
    return random_gate(llava.fingerprint, ("colours", "counts"))


@pytest.fixture(scope="module")
def bundle(llava: Backbone, gate: Gate, tasks: dict[str, Path]) -> Bundle:
    examples = [example for task in gate.tasks for example in read_task(tasks[task])[:2]]
    return bundle_behind(gate, llava, examples, settings={"steps": 3, "gate_misses": 0.02, "base_questions": 1})


@pytest.fixture
def old(bundle: Bundle, tmp_path: Path) -> Path:
    return written(bundle, tmp_path / "old.safetensors")


class Files:
    """The data of the command."""

    def __init__(self, model: Path, tasks: dict[str, Path], folder: Path) -> None:
        self.model, self.tasks, self.new = model, tasks, folder / "new.safetensors"

    def arguments(self, old: Path, *more: object, tasks: Sequence[str] = ("colours", "counts")) -> list[object]:
        asked = [part for task in tasks for part in ("--task", self.tasks[task])]
        base = ("--base", self.tasks["base"])
        return ["gate-fit", old, "--model", self.model, *asked, *base, "--output", self.new, *more]


@pytest.fixture
def files(model_folders: dict[str, Path], tasks: dict[str, Path], tmp_path: Path) -> Files:
    return Files(model_folders["llava"], tasks, tmp_path)


COLOURS = (
    "What colour is it? 3",
    "paint on the door?",
    "tell me the hue",
    "is this red",
    "Which tint did they use?",
    "name its shade please",
    "how would you call that tone",
    "looks blue or green",
    "code of the wall colour",
    "dye they took for our curtains",
    "Was everything painted dark?",
    "describe his colouring",
)


def assert_all_but_the_gate_is_kept(before: Bundle, after: Bundle, settings: dict[str, Any]) -> None:
    for name, tensor in before.tensors().items():
        if not name.startswith("gate_"):
            assert torch.equal(tensor, after.tensors()[name]), name
    assert after.metadata.settings == before.metadata.settings | settings
    assert after.metadata.parent_digest == before.digest != after.digest
    of_the_gate = {"digest", "settings", "parent_digest", "gate", "gate_tasks"}
    assert after.metadata.model_dump(exclude=of_the_gate) == before.metadata.model_dump(exclude=of_the_gate)
    assert after.metadata.gate_tasks == before.metadata.gate_tasks


def test_the_gate_is_that_of_a_fit_and_the_rest_stays(
    llava: Backbone, bundle: Bundle, old: Path, files: Files, tmp_path: Path
) -> None:
    background = tmp_path / "requests.txt"
    background.write_text("".join(f"Open door {number}, please.\n" for number in range(5)))
    content = old.read_bytes()
    options = ("--background", background, "--gate-misses", "0.05")
    printed = command(*files.arguments(old, *options, tasks=("counts", "colours")))  # in any order
    assert old.read_bytes() == content
    after = read_bundle(files.new)
    settings = {"gate_misses": 0.05, "base_questions": 12, "background_requests": 5}
    assert_all_but_the_gate_is_kept(bundle, after, settings)
    own = {task: read_task(files.tasks[task]) for task in ("colours", "counts")}
    assert after.gate is not None
    assert bundle.gate is not None
    data = GateData(own, read_task(files.tasks["base"]), read_background(background))
    expected = fit_gate(llava, data, GateOptions(0.05, layers=bundle.gate.layers))
    for name, tensor in expected.gate.tensors().items():
        assert torch.equal(after.tensors()[name], tensor), name

    lines = printed.splitlines()
    assert lines[0] == f"{files.new}: a gate for colours, counts, digest {after.digest}"
    assert [line.split()[0] for line in lines[3:]] == ["misses", "0.0%", "1.0%", "2.0%", "5.0%", "10.0%"]
    assert [line.split()[1] == "*" for line in lines[4:]] == [False, False, False, True, False]
    for kind in ("base", "base, wrapped", "background", "everyday", "near-miss", "noise"):
        assert kind in lines[3]


def test_a_first_gate(llava: Backbone, bundle: Bundle, files: Files, tmp_path: Path) -> None:
    """A bundle without one gets the gate of a fit, and a gate that looks at no layers of another."""
    plain = bundle.next(gate=None)
    command(*files.arguments(written(plain, tmp_path / "plain.safetensors")))
    after = read_bundle(files.new)
    own = {task: read_task(files.tasks[task]) for task in ("colours", "counts")}
    expected = fit_gate(llava, GateData(own, read_task(files.tasks["base"])))
    assert after.gate is not None
    for name, tensor in expected.gate.tensors().items():
        assert torch.equal(after.tensors()[name], tensor), name
    for name, tensor in plain.tensors().items():
        assert torch.equal(after.tensors()[name], tensor), name


def test_what_is_refused_leaves_nothing(
    old: Path, files: Files, tmp_path: Path, model_folders: dict[str, Path]
) -> None:
    plain = written(random_bundle(), tmp_path / "plain.safetensors")
    mixed = write_task(tmp_path / "mixed", [*questions_about("colours", "What?"), *_of("counts", "How many?")])
    for arguments, problem in (
        (files.arguments(plain), "plain.safetensors: a relevance gate needs another weighting"),
        (files.arguments(old, tasks=["colours"]), "there are no questions of the task 'counts', which the bundle has"),
        (files.arguments(old, tasks=["colours", "places"]), "the bundle does not have the task 'places'"),
        (files.arguments(old, "--task", mixed), "expected questions of one task, found 'colours', 'counts'"),
        (files.arguments(old, "--output", old), "is one of the inputs, which stays as it is"),
        (files.arguments(old, "--model", model_folders["qwen3-vl"]), "another backbone"),
    ):
        assert problem in refuse(*arguments)
    assert not files.new.exists()


def test_near_misses_of_ones_own(tmp_path: Path) -> None:
    """Of questions in people's own words, whose gate has classifiers; what is wrong with the gate is said."""
    backbone = Backbone.load(FAMILIES["llama"](tmp_path / "model"))
    texts = {"colours": COLOURS, "shades": [f"{text} now" for text in COLOURS], "base": [f"So? {n}" for n in range(12)]}
    paths = {
        task: write_task(tmp_path / task, [_asks(task, row, text) for row, text in enumerate(asked)])
        for task, asked in texts.items()
    }
    examples = [example for task in ("colours", "shades") for example in read_task(paths[task])[:2]]
    gate = classified_gate(backbone.fingerprint, ("colours", "shades"), layers=(0, 1))
    bundle = bundle_behind(gate, backbone, examples, settings={"steps": 3})
    old, new = written(bundle, tmp_path / "old.safetensors"), tmp_path / "new.safetensors"
    near_misses, own = tmp_path / "not.txt", tmp_path / "own.txt"
    near_misses.write_text("What colour is the sky?\nWhat shade is it?\n")
    own.write_text("What is this?\nwhat colour  is it? 3\n")

    def arguments(path: Path) -> list[object]:
        asked = [part for task in ("colours", "shades") for part in ("--task", paths[task])]
        options = ["--base", paths["base"], "--not", path, "--output", new]
        return ["gate-fit", old, "--model", tmp_path / "model", *asked, *options]

    problem = "near-miss 'what colour is it? 3' (--not) is a question of the task 'colours'"
    assert problem in refuse(*arguments(own))
    printed = command(*arguments(near_misses))
    after = read_bundle(new)
    questions = {task: read_task(paths[task]) for task in ("colours", "shades")}
    data = GateData(questions, read_task(paths["base"]), near_misses=read_background(near_misses))
    expected = fit_gate(backbone, data, GateOptions(kind="classifiers"))
    settings = {"gate_misses": expected.misses, "base_questions": 12, "background_requests": 0, "near_misses": 2}
    assert_all_but_the_gate_is_kept(bundle, after, settings)
    assert after.gate is not None
    for name, tensor in expected.gate.stored().tensors().items():
        assert torch.equal(after.tensors()[name], tensor), name
    assert "given near-miss" in printed
    warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert [f"warning: {warning}; docs/gate.md" for warning in expected.warnings] == warnings


def _asks(task: str, row: int, text: str) -> dict[str, Any]:
    return record(row, id=f"{task}{row}", task=task, messages=[{"role": "user", "content": text}])


def _of(task: str, text: str) -> list[dict[str, Any]]:
    return [line | {"id": f"{line['id']}-more"} for line in questions_about(task, text)]
