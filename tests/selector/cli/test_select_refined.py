"""`inducekv-select` by its default recipe, the refined one: a stream of tasks, resumption after SIGKILL, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import selector.refined.lr_search as lr_search
import selector.refined.training as training
from inducekv_vllm.bundle import Bundle, read_bundle
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.cli.select import main
from selector.data.examples import read_task
from tests.selector.conftest import record, write_task

FAST = ("--payload-tokens", "2", "--steps", "4", "--batch-size", "4", "--learning-rate", "0.05", "--allow-worse")


def task_of(folder: Path, name: str, question: str) -> Path:
    """Twelve examples of a task that asks its own question about the same pictures."""
    records = [record(number, id=f"{name}{number}", task=name) for number in range(12)]
    for made in records:
        made["messages"][0]["content"][1]["text"] = question
    return write_task(folder / name, records)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stream")
    return {
        "colours": task_of(folder, "colours", "What colour is the circle?"),
        "counts": task_of(folder, "counts", "How many squares are there? Answer with a number."),
        "places": task_of(folder, "places", "Is the red triangle left of the blue one?"),
        "base": task_of(folder, "base", "Describe the whole picture in one long sentence, please."),
    }


@pytest.fixture
def run(model_folders: dict[str, Path], data: dict[str, Path], tmp_path: Path) -> Any:
    """A task's update, as arguments or done: the bundle is OUT/TASK.safetensors."""
    (tmp_path / "out").mkdir()

    def command(task: str, *more: str, previous: str | None = None, budget: int = 4) -> list[str]:
        arguments = ["--model", str(model_folders["llava"]), "--task", str(data[task])]
        arguments += ["--output", str(tmp_path / "out" / f"{task}.safetensors"), "--base", str(data["base"])]
        arguments += ["--anchors", str(tmp_path / "anchors"), "--anchors-per-task", "6", "--budget", str(budget), *FAST]
        if previous:
            arguments += ["--previous", str(tmp_path / "out" / f"{previous}.safetensors")]
        return [*arguments, *more]

    return command


def bundle_of(tmp_path: Path, task: str) -> Bundle:
    return read_bundle(tmp_path / "out" / f"{task}.safetensors")


def report_of(tmp_path: Path, task: str) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / f"{task}.report.json").read_text())


def payload(bundle: Bundle, task: str) -> list[torch.Tensor]:
    rows = [row for row, entry in enumerate(bundle.metadata.entries) if entry.task == task]
    return [bundle.retrieval_keys[rows], bundle.payload_keys[:, rows], bundle.payload_values[:, rows]]


def refuse(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("inducekv-select: error: ")
    return line


def test_old_entries_stay_to_the_bit_when_their_quota_shrinks(run: Any, tmp_path: Path) -> None:
    """Three tasks with at most two entries each, and room for four: every first entry was trained to do alone."""
    more = ("--entries-per-task", "2")
    assert main(run("colours", *more)) == 0
    assert main(run("counts", *more, previous="colours")) == 0
    assert main(run("places", *more, previous="counts")) == 0
    assert report_of(tmp_path, "places")["composition"]["after"] == {"colours": 1, "counts": 1, "places": 1}
    before, after = (payload(bundle_of(tmp_path, task), "colours") for task in ("counts", "places"))
    assert torch.equal(before[0][:1], after[0])
    assert torch.equal(before[1][:, :1], after[1])
    assert all(m["anchors"] is None for m in report_of(tmp_path, "places")["refinement"]["history"])


def test_entries_that_were_not_nested_are_merged_when_their_quota_shrinks(
    run: Any, tmp_path: Path, llava: Backbone
) -> None:
    """Three tasks with at most two entries each, and room for four."""
    more = ("--entries-per-task", "2", "--no-nested")
    assert main(run("colours", *more)) == 0
    assert main(run("counts", *more, previous="colours")) == 0
    assert main(run("places", *more, previous="counts")) == 0
    first, second, third = (bundle_of(tmp_path, task) for task in ("colours", "counts", "places"))
    third.require_backbone(llava.fingerprint)
    assert report_of(tmp_path, "counts")["composition"]["after"] == {"colours": 2, "counts": 2}
    assert report_of(tmp_path, "places")["composition"]["after"] == {"colours": 1, "counts": 1, "places": 1}

    for before, after in zip(payload(first, "colours"), payload(second, "colours"), strict=True):
        assert torch.equal(before, after)
    old, merged = payload(second, "colours"), payload(third, "colours")
    assert any(torch.equal(merged[0][0], key) for key in old[0])  # an entry that was there, with its key
    assert not any(torch.equal(merged[1][:, 0], old[1][:, row]) for row in range(2))  # and other payloads

    assert second.metadata.parent_digest == first.digest
    assert (third.metadata.recipe, third.metadata.weighting) == ("refined", "prior")
    for calibrated in ("temperature", "value_gates", "layer_bias"):
        assert torch.equal(getattr(first, calibrated), getattr(third, calibrated))
    history = report_of(tmp_path, "places")["refinement"]["history"]
    assert all(measured["anchors"] is not None and measured["distillation"] is not None for measured in history)
    assert all(m["anchors"] is None for m in report_of(tmp_path, "counts")["refinement"]["history"])


def test_the_report_describes_the_bundle_on_disk(run: Any, data: dict[str, Path], tmp_path: Path) -> None:
    """NLL, accuracy and gate, computed again from the files."""
    validation = task_of(tmp_path / "validation", "colours", "What colour is the small circle?")
    assert main(run("colours", "--validation", str(validation))) == 0
    found, bundle = report_of(tmp_path, "colours"), bundle_of(tmp_path, "colours")
    backbone = Backbone.load(run("colours")[1])
    bundled, examples = BundledModel(Scorer(backbone), bundle), read_task(validation)
    keys = torch.cat([backbone.query_keys(backbone.encode_example(example)) for example in examples])
    opened, _ = bundled.routing(keys)
    losses = []
    for example, key, is_open in zip(examples, keys, opened.tolist(), strict=True):
        memory = bundled.memory if is_open else None
        terms = memory.terms(key[None, 0]) if memory else None
        losses.append(float(bundled.scorer.losses([example], memory, terms)))
    assert found["validation_nll"]["deployed"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    right = [a == e.answer for a, e in zip(bundled.answers(examples, 8), examples, strict=True)]
    assert found["validation_accuracy"]["deployed"] == pytest.approx(sum(right) / len(right))
    mine = next(one for one in found["gate"]["openings"] if one["split"] == "validation")
    assert mine["opened"] == pytest.approx(float(opened.double().mean()))
    base = next(one for one in found["gate"]["openings"] if one["split"] == "base")
    assert (base["questions"], base["routed_to_own_task"]) == (12, None)
    assert (tmp_path / "out" / "colours.report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_learning_rate_is_searched_and_the_best_trial_goes_on(run: Any, tmp_path: Path) -> None:
    arguments = run("colours", "--steps", "8")
    at = arguments.index("--learning-rate")
    assert main(arguments[:at] + arguments[at + 2 :]) == 0
    found = report_of(tmp_path, "colours")
    best = min(found["refinement"]["search"], key=lambda trial: trial["validation_nll"])
    assert len(found["refinement"]["search"]) == 3
    assert found["settings"]["learning_rate"] == best["learning_rate"]
    assert [measured["step"] for measured in found["refinement"]["history"]] == list(range(8))


def test_the_same_seed_gives_the_same_digest_and_another_one_another(run: Any, tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate(("0", "0", "1")):
        assert main(run("colours", "--seed", seed, "--anchors", str(tmp_path / f"anchors{number}"))) == 0
        digests.append(bundle_of(tmp_path, "colours").digest)
    assert digests[0] == digests[1] != digests[2]


def test_killed_at_any_moment_it_ends_with_the_same_bundle(run: Any, tmp_path: Path) -> None:
    assert main(run("colours", "--steps", "40")) == 0
    expected = bundle_of(tmp_path, "colours")
    (tmp_path / "out" / "colours.safetensors").unlink()
    anchors = ["--anchors", str(tmp_path / "other")]
    command = [sys.executable, "-m", "selector.cli.select", *run("colours", "--steps", "40", *anchors)]
    progress = tmp_path / "out" / ".colours.safetensors.progress" / "refinement.safetensors"
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    until = time.monotonic() + 300
    while not progress.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert progress.exists()
    assert not (tmp_path / "out" / "colours.safetensors").exists()
    assert main(run("colours", "--steps", "40", *anchors)) == 0
    assert bundle_of(tmp_path, "colours").digest == expected.digest
    assert not progress.exists()


@pytest.mark.parametrize("helps", [False, True])
def test_a_memory_that_does_not_help_has_a_status_of_its_own(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    """The untouched model's loss is moved, because with random weights either may be the smaller one."""
    original = BundledModel.mean_loss

    def mean_loss(model: BundledModel, *arguments: Any) -> float:
        return original(model, *arguments) + (100 if helps else -100) * (model.bundle is None)

    monkeypatch.setattr(BundledModel, "mean_loss", mean_loss)
    bundle = tmp_path / "out" / "colours.safetensors"
    arguments = [a for a in run("colours", "--steps", "1", "--learning-rate", "1e-9") if a != "--allow-worse"]
    assert main(arguments) == (0 if helps else 3)
    assert bundle.exists() is helps
    assert (tmp_path / "anchors").exists() is helps
    assert (tmp_path / "out" / "colours.report.json").exists()
    assert ("no better than none" in capsys.readouterr().err) is not helps
    if not helps:
        assert main([*arguments, "--allow-worse"]) == 0
        assert bundle.exists()


def test_bad_input_is_named_and_leaves_everything_as_it_was(
    run: Any, tmp_path: Path, data: dict[str, Path], capsys: pytest.CaptureFixture[str], task_file: Path
) -> None:
    assert main(run("colours", "--entries-per-task", "2")) == 0
    before = (tmp_path / "out" / "colours.safetensors").read_bytes()
    more = ("--entries-per-task", "2")

    second = run("counts", *more, previous="colours")
    assert "the recipe 'paper' only" in refuse(capsys, [*second, "--gamma", "0.1"])
    assert "the recipe 'refined' only" in refuse(capsys, [*second, "--recipe", "paper"])
    assert 'needs the weighting "prior"' in refuse(capsys, [*second, "--weighting", "sqrt"])
    assert "no anchors of the task 'colours'" in refuse(capsys, [*second, "--anchors", str(tmp_path / "none")])
    assert "payload tokens" in refuse(capsys, [*second, "--payload-tokens", "3"])
    mixed = data["counts"].with_name("mixed.jsonl")
    mixed.write_text(data["counts"].read_text().replace('"task": "counts"', '"task": "more"', 1))
    assert "one task at a time" in refuse(capsys, [*second, "--task", str(mixed)])
    stranger = [*second, "--validation", str(data["places"])]
    assert "is of the task 'places', expected 'counts'" in refuse(capsys, stranger)
    overlap = [*second, "--base", str(data["counts"])]
    assert "is also a question of" in refuse(capsys, overlap)
    alone = run("counts", *more)  # without --previous, beside the first task's anchors
    assert "there is no previous bundle" in refuse(capsys, alone)
    assert "below one entry for each of 2 tasks" in refuse(capsys, [*run("counts", previous="colours", budget=1)])
    assert "at least 1" in refuse(capsys, [*second, "--entries-per-task", "0"])

    assert (tmp_path / "out" / "colours.safetensors").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".safetensors") == [
        "colours.safetensors"
    ]


def test_a_learning_rate_that_diverges_is_out_of_the_search(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lr_search, "LEARNING_RATES", (0.05, 1e30))
    arguments = run("colours", "--steps", "12")
    at = arguments.index("--learning-rate")
    assert main(arguments[:at] + arguments[at + 2 :]) == 0
    trials = report_of(tmp_path, "colours")["refinement"]["search"]
    assert [trial["validation_nll"] is None for trial in trials] == [False, True]
    assert bundle_of(tmp_path, "colours").metadata.settings["learning_rate"] == 0.05


def test_a_paper_bundle_cannot_be_continued(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folders: dict[str, Path], data: dict[str, Path]
) -> None:
    paper = ["--model", str(model_folders["llava"]), "--task", str(data["colours"]), "--budget", "2"]
    paper += ["--recipe", "paper"]
    paper += ["--output", str(tmp_path / "out" / "colours.safetensors"), "--beta", "0.5", "--gamma", "0.1"]
    paper += ["--iterations", "1", "--inner-steps", "1", "--payload-tokens", "2", "--allow-worse"]
    assert main([*paper, "--anchors", str(tmp_path / "anchors")]) == 0
    refusal = refuse(capsys, run("counts", "--recipe", "refined", previous="colours"))
    assert "made by the recipe 'paper', which the recipe 'refined' cannot continue" in refusal


def test_a_loss_that_is_not_a_number_writes_nothing(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "clipped", lambda gradients: {n: g * float("nan") for n, g in gradients.items()})
    assert "not a finite number" in refuse(capsys, run("colours"))
    assert not (tmp_path / "out" / "colours.safetensors").exists()
    assert not (tmp_path / "anchors").exists()
