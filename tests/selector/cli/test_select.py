"""`inducekv-select` as a user runs it: results, resumption after SIGKILL, a stream of two tasks, every refusal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import selector.paper.update as update_module
from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.cli.select import main
from selector.data.anchors import AnchorStore
from selector.data.examples import read_task
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.selector.conftest import record, write_task

FAST = ("--budget", "3", "--payload-tokens", "2", "--iterations", "2", "--inner-steps", "1", "--full-pool")
PAPER = ("--recipe", "paper")
# A model of random weights knows no task: whether its memory is any good is a matter of chance.
ANYWAY = ("--allow-worse",)
# Without the grid.
FIXED = ("--beta", "0.5", "--gamma", "0.1")


@pytest.fixture
def second_task(tmp_path: Path) -> Path:
    """Asks something else about the same pictures."""
    records = [record(number, id=f"s{number}", task="counts") for number in range(8)]
    for made in records:
        made["messages"][0]["content"].append({"type": "text", "text": "How many are there?"})
    return write_task(tmp_path / "second", records, num_pictures=8)


@pytest.fixture
def command(model_folders: dict[str, Path], task_file: Path, tmp_path: Path) -> list[str]:
    """A run that would succeed; the bundle is OUT/next.safetensors."""
    return [
        "--model",
        str(model_folders["llava"]),
        "--task",
        str(task_file),
        "--output",
        str(output(tmp_path)),
        *PAPER,
        *FAST,
        *ANYWAY,
    ]


def output(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir(exist_ok=True)
    return folder / "next.safetensors"


def report(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "next.report.json").read_text())


def refuse(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line of a command that must fail."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("inducekv-select: error: ")
    return lines[-1]


def test_it_writes_a_bundle_a_report_and_nothing_else(command: list[str], tmp_path: Path, llava: Backbone) -> None:
    assert main([*command, *FIXED]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "next.safetensors",
        "next.report.json",
        "next.report.html",
    }
    bundle, found = read_bundle(output(tmp_path)), report(tmp_path)
    bundle.require_backbone(llava.fingerprint)
    assert bundle.num_entries == 3
    assert bundle.metadata.recipe == "paper"
    assert bundle.metadata.settings["beta"] == 0.5
    assert bundle.metadata.settings["gamma"] == 0.1
    assert not bundle.layer_bias.any()
    assert found["digest"] == bundle.digest
    assert [measured["support"] for measured in found["history"]] == [11, 11]
    assert found["composition"] == {"before": {}, "after": {"colours": 3}}
    assert [phase["name"] for phase in found["phases"]] == ["check", "extract", "shortlist", "select", "measure"]


def test_the_report_is_that_of_the_bundle_on_disk(
    command: list[str], tmp_path: Path, llava: Backbone, task_file: Path, second_task: Path
) -> None:
    """NLL with the bundle and without, computed again from the files."""
    assert main([*command, *FIXED, "--validation", str(second_task)]) == 0
    examples = read_task(second_task)
    keys = torch.cat([llava.retrieval_keys(llava.encode_example(example)) for example in examples])
    scorer, questions = Scorer(llava), Questions(examples, keys)
    found = report(tmp_path)["validation_nll"]
    expected = scorer.mean_loss(questions, Memory.from_bundle(read_bundle(output(tmp_path))))
    assert found["deployed"] == pytest.approx(expected, rel=1e-4)
    assert found["no_memory"] == pytest.approx(scorer.mean_loss(questions), rel=1e-4)
    assert found["rounding_gap"] == pytest.approx(found["deployed"] - found["relaxed"])


def test_the_same_seed_gives_the_same_digest_and_another_one_another(command: list[str], tmp_path: Path) -> None:
    digests = []
    for seed in ("0", "0", "1"):
        assert main([*command, *FIXED, "--seed", seed]) == 0
        digests.append(read_bundle(output(tmp_path)).digest)
    assert digests[0] == digests[1] != digests[2]


def test_the_first_task_searches_gamma_and_later_tasks_keep_it(
    command: list[str], tmp_path: Path, second_task: Path
) -> None:
    store = ["--anchors", str(tmp_path / "anchors"), "--anchors-per-task", "4"]
    assert main([*command, *store]) == 0
    first, grid = read_bundle(output(tmp_path)), report(tmp_path)["grid"]
    assert [pair["gamma"] for pair in grid] == [0.0, 0.05, 0.1, 0.3]
    best = min(grid, key=lambda pair: pair["validation_nll"])
    assert first.metadata.settings["gamma"] == best["gamma"]
    assert [task.count for task in AnchorStore(tmp_path / "anchors").tasks()] == [4]
    before = output(tmp_path).read_bytes()

    following = tmp_path / "out" / "second.safetensors"
    again = [*command, *store, "--task", str(second_task), "--output", str(following)]
    again = [argument for argument in again if argument not in PAPER]  # it is the previous bundle's
    assert main([*again, "--previous", str(output(tmp_path))]) == 0
    second = read_bundle(following)
    found = json.loads((tmp_path / "out" / "second.report.json").read_text())
    assert second.metadata.recipe == first.metadata.recipe == "paper"
    assert second.metadata.parent_digest == first.digest
    assert {name: second.metadata.settings[name] for name in ("beta", "gamma")} == {
        name: first.metadata.settings[name] for name in ("beta", "gamma")
    }
    assert found["pool"]["from_previous"] == 3
    assert found["pool"]["anchors"] == 4
    assert found["history"][0]["anchors"] > 0
    assert found["composition"]["before"] == {"colours": 3}
    assert found["storage"]["anchors"] == 8
    assert found["storage"]["anchor_bytes"] == AnchorStore(tmp_path / "anchors").bytes()
    assert output(tmp_path).read_bytes() == before


def test_killed_at_any_moment_it_ends_with_the_same_digest(
    command: list[str], tmp_path: Path, second_task: Path
) -> None:
    arguments = [*command, *FIXED, "--anchors", str(tmp_path / "anchors"), "--iterations", "12"]
    whole = [*command, *FIXED, "--anchors", str(tmp_path / "other anchors"), "--iterations", "12"]
    assert main(whole) == 0
    expected = read_bundle(output(tmp_path)).digest
    output(tmp_path).unlink()

    progress = tmp_path / "out" / ".next.safetensors.progress"
    run = [sys.executable, "-m", "selector.cli.select", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(progress.glob("beta-*.safetensors")) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert not output(tmp_path).exists()
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert "resuming an earlier run" in done.stderr
    assert read_bundle(output(tmp_path)).digest == expected
    assert len(report(tmp_path)["history"]) == 12
    assert not progress.exists()
    assert len(AnchorStore(tmp_path / "anchors").tasks()) == 1


@pytest.mark.parametrize("crash", ["AnchorStore.append", "write_report", "write_bundle"])
def test_stopped_while_it_writes_it_ends_with_the_same_digest(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    """Bundle, anchors and report are three writes: stopping after any of them must not confuse the next run."""
    arguments = [*command, *FIXED, "--anchors", str(tmp_path / "anchors")]
    target = {
        "AnchorStore.append": "selector.data.anchors.AnchorStore.append",
        "write_report": "selector.cli.outputs.write_report",
        "write_bundle": "selector.cli.outputs.write_bundle",
    }[crash]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, stop)
        assert main(arguments) == 2
    assert output(tmp_path).exists() is (crash != "write_bundle")  # the first of the three
    assert main(arguments) == 0
    resumed = read_bundle(output(tmp_path)).digest
    assert main([*command, *FIXED, "--anchors", str(tmp_path / "others")]) == 0
    assert read_bundle(output(tmp_path)).digest == resumed
    assert [task.count for task in AnchorStore(tmp_path / "anchors").tasks()] == [11]


def test_progress_of_other_settings_is_not_used(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *FIXED, "--seed", "1"]) == 0
    expected = read_bundle(output(tmp_path)).digest

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(update_module, "_round", stop)
        assert main([*command, *FIXED, "--seed", "0"]) == 2
    assert main([*command, *FIXED, "--seed", "1"]) == 0
    assert "resuming" not in capsys.readouterr().err
    assert read_bundle(output(tmp_path)).digest == expected


def test_the_shortlist_bounds_the_pool(command: list[str], tmp_path: Path) -> None:
    for policy in ("nearest", "random"):
        assert main([*command, *FIXED, "--shortlist", "2", "--shortlist-policy", policy]) == 0
        assert report(tmp_path)["pool"]["candidates"] == 6


@pytest.mark.parametrize("options", [["--hypergradient", "unrolled"], ["--step-rule", "normalized"]])
def test_named_options_lead_elsewhere(command: list[str], tmp_path: Path, options: list[str]) -> None:
    weights = []
    for extra in ([], options):
        assert main([*command, *FIXED, *extra]) == 0
        weights.append(report(tmp_path)["rounding"]["effective_entries"])
    assert weights[0] != weights[1]


def test_a_settings_file_stands_behind_the_command_line(command: list[str], tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('beta = 0.25\ngamma = 0.3\nseed = 3\nstep-rule = "normalized"\nfull_pool = true\n')
    assert main([*command, "--config", str(settings), "--seed", "4"]) == 0
    found = read_bundle(output(tmp_path)).metadata.settings
    assert (found["beta"], found["gamma"], found["seed"], found["step_rule"]) == (0.25, 0.3, 4, "normalized")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 3", "unknown setting 'colour'"),
        ("beta = [1]", "beta must be a number or a string"),
        ("full_pool = 3", "full_pool must be true or false"),
        ("beta = ", "not TOML"),
    ],
)
def test_a_wrong_settings_file_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "settings.toml").write_text(text)
    assert message in refuse(capsys, [*command, "--config", str(tmp_path / "settings.toml")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "refined"], "--iterations is a setting of the recipe 'paper' only"),
        (["--steps", "5"], "--steps is a setting of the recipe 'refined' only"),
        (["--budget", "0"], "budget must be at least 1, found 0"),
        (["--payload-tokens", "0"], "payload_tokens must be at least 1"),
        (["--iterations", "-1"], "iterations must be at least 0"),
        (["--shortlist", "0"], "shortlist must be at least 1"),
        (["--beta", "-1"], "beta must be at least 0, found -1.0"),
        (["--gamma", "nan"], "gamma must be a finite number, found nan"),
        (["--seed", "-1"], "seed must be at least 0, found -1"),
        (["--anchors-per-task", "0"], "anchors_per_task must be at least 1"),
        (["--output", "/nowhere/next.safetensors"], "the folder /nowhere does not exist"),
        (["--previous", "/nowhere/old.safetensors"], "/nowhere/old.safetensors: no such file"),
        (["--task", "/nowhere/train.jsonl"], "cannot read the task data"),
        (["--publish", "ftp://host"], "must be an http or https address"),
        (["--betta", "1"], "unrecognized arguments: --betta 1"),
        (["--weighting", "cube"], "invalid choice: 'cube'"),
    ],
)
def test_wrong_arguments_are_refused(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in refuse(capsys, [*command, *options])
    assert list((tmp_path / "out").iterdir()) == []


def test_an_empty_task_is_refused(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, single = write_task(tmp_path / "empty", []), write_task(tmp_path / "single", [record(0)])
    assert "holds no examples" in refuse(capsys, [*command, "--task", str(empty)])
    assert "use --validation" in refuse(capsys, [*command, "--task", str(single)])


def test_an_example_longer_than_the_context_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record(0), record(1, answer="word " * 5000), record(2)]
    task = write_task(tmp_path / "long", records)
    message = refuse(capsys, [*command, *FIXED, "--task", str(task)])
    assert "example 'e1' of task 'colours' has" in message
    assert not output(tmp_path).exists()


def test_training_examples_are_no_validation(
    command: list[str], task_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refuse(capsys, [*command, "--validation", str(task_file)])
    assert "example 'e0' is also a training example" in message


@pytest.fixture
def previous(llava: Backbone, second_task: Path, tmp_path: Path) -> Path:
    """Two entries of another task, two payload tokens each."""
    bundle = build_bundle(llava, read_task(second_task)[:2], BuildSettings(budget=2, payload_tokens=2))
    write_bundle(bundle, tmp_path / "old.safetensors")
    return tmp_path / "old.safetensors"


def test_a_previous_bundle_that_does_not_fit_is_refused_and_stays(
    command: list[str],
    previous: Path,
    model_folders: dict[str, Path],
    second_task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = previous.read_bytes()
    old = [*command, *FIXED, "--previous", str(previous)]
    assert "has 2 payload tokens an entry, found 4" in refuse(capsys, [*old, "--payload-tokens", "4"])
    assert "budget of 1 is below the 2 entries" in refuse(capsys, [*old, "--budget", "1"])
    message = refuse(capsys, [*old, "--model", str(model_folders["qwen3-vl"])])
    assert "was made for another backbone: architecture" in message
    assert "which stays as it is" in refuse(capsys, [*old, "--output", str(previous)])
    assert "already that of an entry" in refuse(capsys, [*old, "--task", str(second_task)])
    assert not output(tmp_path).exists()
    assert previous.read_bytes() == before
    assert main(old) == 0


def test_a_task_whose_anchors_exist_is_refused_before_any_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--anchors", str(tmp_path / "anchors")]
    assert main([*command, *FIXED, *store]) == 0
    message = refuse(capsys, [*command, *FIXED, *store, "--seed", "1"])
    assert "already has anchors of the task 'colours'" in message


def test_a_full_disk_leaves_the_old_bundle(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *FIXED]) == 0
    before = output(tmp_path).read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("inducekv_vllm.bundle.safetensors.torch.save_file", full)
        assert "No space left" in refuse(capsys, [*command, *FIXED, "--seed", "1"])
    with monkeypatch.context() as patch:
        patch.setattr("selector.runtime.checkpoint.replace_file", full)
        assert "cannot keep the progress" in refuse(capsys, [*command, *FIXED, "--seed", "2"])
    assert output(tmp_path).read_bytes() == before
    assert not list((tmp_path / "out").glob("*.tmp"))


@pytest.mark.parametrize("full_for", ["bundle", "anchors"])
def test_a_full_disk_leaves_the_store_as_it_was_and_the_run_can_be_repeated(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    full_for: str,
) -> None:
    """The store is only ever appended to: anchors of a memory that never came would be in every later run's way."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    arguments = [*command, *FIXED, "--anchors", str(tmp_path / "anchors")]
    target = {
        "bundle": "inducekv_vllm.bundle.safetensors.torch.save_file",
        "anchors": "selector.data.anchors.replace_file",
    }
    with monkeypatch.context() as patch:
        patch.setattr(target[full_for], full)
        assert "No space left" in refuse(capsys, arguments)
    assert AnchorStore(tmp_path / "anchors").tasks() == ()
    assert output(tmp_path).exists() is (full_for == "anchors")
    # The store takes the task from whoever asks for it next, be it with other settings.
    assert main([*arguments, "--seed", "1"]) == 0
    assert [task.count for task in AnchorStore(tmp_path / "anchors").tasks()] == [11]


def test_a_loss_that_is_no_number_is_an_error(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **_: Any) -> list[torch.Tensor]:
        return [torch.full((len(answer), 1000), float("nan"), requires_grad=True) for answer in arguments[2]]

    monkeypatch.setattr("selector.backbone.scoring.answer_logprobs", broken)
    assert "the loss is not a finite number for the examples 'e" in refuse(capsys, [*command, *FIXED])
    assert not output(tmp_path).exists()


@pytest.mark.parametrize("refused", [False, True])
def test_the_bundle_is_published(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: bool,
) -> None:
    """Where the server refuses at first, the same command publishes again without computing anything."""
    statuses, progress = [400 if refused else 200], tmp_path / "out" / ".next.safetensors.progress"
    requests: list[tuple[str, str | None, dict[str, Any]]] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers["Authorization"], body))
            self.send_response(statuses[-1])
            self.end_headers()
            self.wfile.write(json.dumps({"name": body["name"], "error": {"message": "no room"}}).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("INDUCEKV_API_KEY", "secret")
        address = f"http://127.0.0.1:{server.server_port}/"
        arguments = [*command, *FIXED, "--publish", address]
        if refused:
            message = refuse(capsys, arguments)
            assert "was written, but" in message
            assert "no room" in message
            assert progress.exists()
            written = output(tmp_path).stat().st_mtime_ns
            statuses.append(200)
            monkeypatch.setattr("selector.cli.select._load", lambda model: pytest.fail("it computes again"))
        assert main(arguments) == 0
        server.shutdown()
    body = {"name": "next", "path": str(output(tmp_path).resolve()), "replace": True}
    assert requests == [("/v1/load_memory_bundle", "Bearer secret", body)] * (2 if refused else 1)
    assert isinstance(read_bundle(output(tmp_path)), Bundle)
    assert not refused or output(tmp_path).stat().st_mtime_ns == written
    assert not progress.exists()


def test_a_bundle_that_was_removed_after_a_refused_publication_is_made_again(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command, *FIXED, "--publish", "http://127.0.0.1:9"]
    assert "cannot be reached" in refuse(capsys, arguments)
    expected = read_bundle(output(tmp_path))
    output(tmp_path).unlink()
    assert "cannot be reached" in refuse(capsys, arguments)
    assert read_bundle(output(tmp_path)).digest == expected.digest
