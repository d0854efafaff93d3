"""`inducekv-select` by the paper's recipe: results, resumption after SIGKILL, a stream of two tasks, every refusal."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import with_metadata, write_bundle
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.anchors import AnchorStore
from selector.data.examples import read_task
from tests.unit.selector.imitated import Request, imitated_server
from tests.unit.selector.stream import PAPER, Stream, full_disk, stop


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model_folders: dict[str, Path], tasks: dict[str, Path]) -> Stream:
    """Has learnt "colours" without an interruption; not to be changed."""
    stream = Stream(tmp_path_factory.mktemp("whole"), model_folders["llava"], tasks)
    stream.update("colours")
    return stream


def anchors_in(store: Path) -> list[int]:
    """How many anchors each task has."""
    return [task.count for task in AnchorStore(store).tasks()]


def test_it_writes_a_bundle_a_report_and_nothing_else(whole: Stream, llava: Backbone) -> None:
    bundle, report = whole.bundle("colours"), whole.report("colours")
    assert {path.name for path in whole.folder.iterdir()} == {
        "colours.safetensors",
        "colours.report.json",
    }
    bundle.require_backbone(llava.fingerprint)
    assert bundle.num_entries == 3
    assert bundle.metadata.recipe == "paper"
    assert bundle.metadata.settings["beta"] == 0.5
    assert bundle.metadata.settings["gamma"] == 0.1
    assert not bundle.layer_bias.any()
    assert report["digest"] == bundle.digest
    assert [measured["support"] for measured in report["history"]] == [11, 11]
    assert report["composition"] == {"before": {}, "after": {"colours": 3}}


def test_the_report_is_that_of_the_bundle_on_disk(stream: Stream, llava: Backbone) -> None:
    """NLL with the bundle and without, computed again from the files."""
    validation = stream.tasks["counts"]
    bundle = stream.update("colours", "--validation", str(validation))
    examples = read_task(validation)
    keys = torch.cat([llava.retrieval_keys(llava.encode_example(example)) for example in examples])
    scorer, questions = Scorer(llava), Questions(examples, keys)
    losses = stream.report("colours")["validation_nll"]
    assert losses["deployed"] == pytest.approx(scorer.mean_loss(questions, TensorMemory.from_bundle(bundle)), rel=1e-4)
    assert losses["no_memory"] == pytest.approx(scorer.mean_loss(questions), rel=1e-4)
    assert losses["rounding_gap"] == pytest.approx(losses["deployed"] - losses["relaxed"])


def test_the_first_task_searches_gamma_and_later_tasks_keep_it(stream: Stream, tmp_path: Path) -> None:
    store = AnchorStore(tmp_path / "anchors")
    anchors = ("--anchors", str(store.folder), "--anchors-per-task", "4")
    first, grid = replace(stream, options=PAPER).update("colours", *anchors), stream.report("colours")["grid"]
    assert [pair["gamma"] for pair in grid] == [0.0, 0.05, 0.1, 0.3]
    best = min(grid, key=lambda pair: pair["validation_nll"])
    assert first.metadata.settings["gamma"] == best["gamma"]
    assert anchors_in(store.folder) == [4]
    before = stream.output("colours").read_bytes()

    later = replace(stream, options=PAPER[2:])  # the recipe is the previous bundle's
    second, report = later.update("counts", *anchors, previous="colours"), stream.report("counts")
    assert second.metadata.recipe == first.metadata.recipe == "paper"
    assert second.metadata.parent_digest == first.digest
    for name in ("beta", "gamma"):
        assert second.metadata.settings[name] == first.metadata.settings[name]
    assert report["pool"]["from_previous"] == 3
    assert report["pool"]["anchors"] == 4
    assert report["history"][0]["anchors"] > 0
    assert report["composition"]["before"] == {"colours": 3}
    assert report["storage"]["anchors"] == 8
    assert report["storage"]["anchor_bytes"] == store.bytes()
    assert stream.output("colours").read_bytes() == before

    again = later.refuse("colours", *anchors, "--output", str(tmp_path / "again.safetensors"), previous="colours")
    assert "has anchors of the task 'colours', which the previous bundle holds" in again


def test_stopped_while_it_writes_it_ends_with_the_same_digest(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Stream
) -> None:
    """Bundle, anchors and report are three writes: stopping in any of them must not confuse the next run."""
    anchors = ("--anchors", str(tmp_path / "anchors"))
    for writer, is_written in (
        ("selector.update.outputs.write_bundle", False),
        ("selector.data.anchors.AnchorStore.append", True),
        ("selector.update.outputs.write_report", True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(writer, stop)
            assert stream.run("colours", *anchors) == 2
        assert stream.output("colours").exists() is is_written
    assert stream.update("colours", *anchors).digest == whole.bundle("colours").digest
    assert anchors_in(tmp_path / "anchors") == [11]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "refined"], "--iterations is for the recipe 'paper', and this run's is 'refined'"),
        (["--steps", "5"], "--steps is for the recipe 'refined' and 'document', and this run's is 'paper'"),
        (["--output", "x" * 300], "cannot write there: File name too long"),
        (["--previous", "/nowhere/old.safetensors"], "/nowhere/old.safetensors: no such file"),
        (["--publish", "ftp://host"], "must be an http or https address, found 'ftp://host'"),
        (["--publish", "127.0.0.1:18100"], "did you mean http://127.0.0.1:18100?"),
        (["--publish", "http://host:x"], "must be an address such as http://127.0.0.1:8000"),
        (["--recipe", "other"], "--recipe must be refined or paper, found 'other'"),
        (["--betta", "1"], "unrecognized arguments: --betta 1"),
        (["--weighting", "cube"], "invalid choice: 'cube'"),
        (
            ["--weighting", "uniform"],
            "weighting: Input should be 'sqrt' or 'prior'",
        ),  # of the other recipe
    ],
)
def test_wrong_arguments_are_refused(stream: Stream, options: list[str], message: str) -> None:
    assert message in stream.refuse("colours", *options)
    assert list(stream.folder.iterdir()) == []


def test_a_previous_bundle_that_does_not_fit_is_refused_and_stays(
    stream: Stream, model_folders: dict[str, Path]
) -> None:
    stream.update("counts", "--budget", "2")
    before = stream.output("counts").read_bytes()
    for task, options, message in [
        ("colours", ("--payload-tokens", "4"), "has 2 payload tokens an entry, found 4"),
        ("colours", ("--budget", "1"), "budget of 1 is below the 2 entries"),
        ("colours", ("--model", str(model_folders["qwen3-vl"])), "was made for another backbone: architecture"),
        ("colours", ("--model", str(model_folders["qwen3-vl"]), "--dry-run"), "was made for another backbone"),
        ("colours", ("--output", str(stream.output("counts"))), "which stays as it is"),
        ("colours", ("--output", str(stream.tasks["colours"])), "which stays as it is"),
        ("counts", ("--output", str(stream.output("colours"))), "already that of an entry"),
    ]:
        assert message in stream.refuse(task, *options, previous="counts")
    assert not stream.output("colours").exists()
    assert stream.output("counts").read_bytes() == before
    stream.update("colours", previous="counts")
    write_bundle(with_metadata(stream.bundle("counts"), recipe="route"), stream.output("counts"))
    assert "recipe 'route', which the recipe 'paper' cannot continue" in stream.refuse("colours", previous="counts")


def test_a_full_disk_leaves_the_old_bundle(stream: Stream, whole: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(whole.folder, stream.folder, dirs_exist_ok=True)
    before = stream.output("colours").read_bytes()
    for seed, writer, message in [
        ("1", "inducekv_vllm.bundle.file.replacing", "No space left"),
        ("2", "selector.runtime.checkpoint.replace_file", "cannot keep the progress"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(writer, full_disk)
            assert message in stream.refuse("colours", "--seed", seed)
    assert stream.output("colours").read_bytes() == before
    assert not list(stream.folder.glob("*.tmp"))


def test_the_bundle_is_published(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server refuses, it is on disk."""
    statuses = iter((200, 400))
    requests: list[tuple[str, str | None, str | None, dict[str, Any]]] = []

    def answer(request: Request) -> tuple[int, Any]:
        keys = request.headers["Authorization"], request.headers["X-InduceKV-Admin-Key"]
        requests.append((request.path, *keys, request.body))
        return next(statuses), {"name": request.body["name"], "error": {"message": "no room"}}

    with imitated_server(answer) as url:
        monkeypatch.setenv("INDUCEKV_API_KEY", "secret")
        monkeypatch.setenv("INDUCEKV_ADMIN_KEY", "admin's")
        address = ("--publish", f"{url}/")
        stream.update("colours", *address)
        assert len(requests) == 1
        written = stream.output("colours").read_bytes()
        message = stream.refuse("colours", *address)
        assert "was written, but" in message
        assert message.rstrip().endswith("no room; inducekv-bundle publish loads it")
    body = {"name": "colours", "path": str(stream.output("colours").resolve()), "replace": True}
    assert requests == [("/v1/load_memory_bundle", "Bearer secret", "admin's", body)] * 2
    assert stream.output("colours").read_bytes() == written
    assert not stream.progress("colours").exists()
