"""Two processes under torchrun against one: the same memory, the same errors, and nothing written twice."""

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

from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from selector.backbone.model import Backbone
from selector.cli.select import main
from selector.data.anchors import AnchorStore
from selector.data.examples import read_task
from selector.runtime import distributed
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.selector.conftest import record, write_task

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
# Batches are split unevenly: five examples, and one anchor, which leaves a process without any.
SETTINGS = ("--budget", "4", "--payload-tokens", "2", "--iterations", "8", "--inner-steps", "2", "--full-pool")
FIXED = ("--beta", "0.5", "--gamma", "0.1", "--batch-size", "5", "--anchors-per-task", "3", "--allow-worse")
# Of float32 sums in another order and matrix products of another shape, after 8 outer and 16 inner steps that feed on
# each other; relative. Found: 2e-7.
TOLERANCE = 1e-5
ONE_STEP_OF_FLOAT16 = 2**-10  # should another number of threads move what is rounded to float16


def environment() -> dict[str, str]:
    return os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [*TORCHRUN, *arguments]
    return subprocess.run(run, env=environment(), capture_output=True, text=True)


class Stream:
    """A second task's update, with a previous memory and anchors of the first task, in a folder for each run."""

    def __init__(self, folder: Path, model: Path, task: Path, previous: Path) -> None:
        self.folder, self.model, self.task, self.previous = folder, model, task, previous

    def arguments(self, name: str) -> list[str]:
        (self.folder / name).mkdir(exist_ok=True)
        return [
            *("--model", str(self.model), "--task", str(self.task), "--previous", str(self.previous)),
            *("--output", str(self.output(name)), "--anchors", str(self.anchors(name)), *SETTINGS, *FIXED),
        ]

    def output(self, name: str) -> Path:
        return self.folder / name / "next.safetensors"

    def anchors(self, name: str) -> Path:
        store = self.folder / name / "anchors"
        if not store.exists():
            examples = read_task(self.task.parent.parent / "first" / "train.jsonl")[:1]
            AnchorStore(store).append(examples, run="earlier", policy="random", seed=0)
        return store

    def report(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name / "next.report.json").read_text())


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory, llava: Backbone, model_folders: dict[str, Path]) -> Stream:
    folder = tmp_path_factory.mktemp("stream")
    records = [record(number, id=f"s{number}", task="counts", answer=f"{number} of them") for number in range(11)]
    first = write_task(folder / "first", [record(number) for number in range(3)])
    second = write_task(folder / "second", records)
    previous = folder / "previous.safetensors"
    bundle = build_bundle(llava, read_task(first), BuildSettings(budget=4, payload_tokens=2))
    write_bundle(bundle, previous)
    return Stream(folder, model_folders["llava"], second, previous)


@pytest.fixture(scope="module")
def alone(stream: Stream) -> Bundle:
    """What one process makes."""
    assert main(stream.arguments("alone")) == 0
    return read_bundle(stream.output("alone"))


@pytest.fixture(scope="module")
def shared(stream: Stream) -> tuple[Bundle, subprocess.CompletedProcess[str]]:
    """What two make."""
    done = torchrun("selector.cli.select", *stream.arguments("shared"))
    assert done.returncode == 0, done.stderr
    return read_bundle(stream.output("shared")), done


def test_two_processes_make_the_memory_of_one(
    stream: Stream, alone: Bundle, shared: tuple[Bundle, subprocess.CompletedProcess[str]]
) -> None:
    bundle = shared[0]
    assert bundle.metadata.entries == alone.metadata.entries
    assert bundle.metadata.settings == alone.metadata.settings
    for name, tensor in alone.tensors().items():
        tolerance = ONE_STEP_OF_FLOAT16 if tensor.dtype == torch.float16 else TOLERANCE
        torch.testing.assert_close(bundle.tensors()[name], tensor, rtol=tolerance, atol=TOLERANCE)
    ours, theirs = stream.report("shared"), stream.report("alone")
    for one, other in zip(ours["history"], theirs["history"], strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
    assert ours["validation_nll"] == pytest.approx(theirs["validation_nll"], rel=TOLERANCE)
    assert ours["history"][-1]["temperature"] != pytest.approx(0.07, rel=10 * TOLERANCE), "nothing was fitted"
    assert [task.digest for task in AnchorStore(stream.anchors("shared")).tasks()] == [
        task.digest for task in AnchorStore(stream.anchors("alone")).tasks()
    ]


def test_two_processes_refine_as_one_does(stream: Stream, model_folders: dict[str, Path]) -> None:
    """Trained in float32: AdamW divides by the root of what it has seen, so rounding grows faster than elsewhere."""
    settings = ("--recipe", "refined", "--budget", "3", "--payload-tokens", "2", "--steps", "4", "--batch-size", "5")
    rest = ("--learning-rate", "0.05", "--precision", "float32", "--allow-worse", "--seed", "3")
    bundles = []
    for name in ("refined-alone", "refined-shared"):
        (stream.folder / name).mkdir()
        output = stream.folder / name / "next.safetensors"
        data = ("--model", str(model_folders["llava"]), "--task", str(stream.task), "--output", str(output))
        if name == "refined-alone":
            assert main([*data, *settings, *rest]) == 0
        else:
            done = torchrun("selector.cli.select", *data, *settings, *rest)
            assert done.returncode == 0, done.stderr
        bundles.append(read_bundle(output))
    alone, shared = bundles
    assert shared.metadata.entries == alone.metadata.entries
    for name in ("retrieval_keys", "gate_keys"):
        torch.testing.assert_close(shared.tensors()[name], alone.tensors()[name], rtol=ONE_STEP_OF_FLOAT16, atol=1e-5)
    for name in ("temperature", "value_gates", "layer_bias", "gate_thresholds"):
        torch.testing.assert_close(shared.tensors()[name], alone.tensors()[name], rtol=1e-4, atol=1e-4)
    for name in ("payload_keys", "payload_values"):
        torch.testing.assert_close(shared.tensors()[name], alone.tensors()[name], rtol=1e-2, atol=1e-3)


def test_only_the_main_process_speaks(stream: Stream, shared: tuple[Bundle, subprocess.CompletedProcess[str]]) -> None:
    bundle, done = shared
    assert done.stdout == (
        f"{stream.output('shared')}: 4 entries, "
        + ", ".join(f"{task} ({count})" for task, count in stream.report("shared")["composition"]["after"].items())
        + f", digest {bundle.digest}\n"
    )
    assert {path.name for path in stream.output("shared").parent.iterdir()} == {
        "next.safetensors",
        "next.report.json",
        "next.report.html",
        "anchors",
    }


def test_torchrun_killed_and_started_again_ends_with_the_same_digest(
    stream: Stream, shared: tuple[Bundle, subprocess.CompletedProcess[str]]
) -> None:
    """Its processes die with it, so that the next ones meet nobody."""
    arguments = stream.arguments("killed")
    progress = stream.output("killed").with_name(".next.safetensors.progress")
    run = [*TORCHRUN, "selector.cli.select", *arguments]
    with subprocess.Popen(run, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(progress.glob("beta-*.safetensors")) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    time.sleep(1)
    state = {path.name: path.stat().st_mtime_ns for path in progress.iterdir()}
    time.sleep(1)
    assert {path.name: path.stat().st_mtime_ns for path in progress.iterdir()} == state, "a process is still writing"
    assert not stream.output("killed").exists()
    done = torchrun("selector.cli.select", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("resuming an earlier run") == 1
    assert read_bundle(stream.output("killed")).digest == shared[0].digest


def test_an_error_is_printed_once_and_ends_all(stream: Stream) -> None:
    arguments = stream.arguments("refused")
    done = torchrun("selector.cli.select", *arguments, "--budget", "2")
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("inducekv-select: error: ")]
    assert errors == [
        "inducekv-select: error: the budget of 2 is below the 3 entries of the previous tasks",
    ]
    assert not stream.output("refused").exists()


def test_what_two_processes_check_together(model_folders: dict[str, Path], task_file: Path, tmp_path: Path) -> None:
    done = torchrun(
        "tests.selector.runtime.distributed_checks", str(model_folders["llava"]), str(task_file), str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"process {number}: all checks passed" for number in range(2)]


def test_without_torchrun_nothing_happens() -> None:
    with distributed.process_group():
        assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
        assert distributed.shard([1, 2, 3]) == [1, 2, 3]
        assert distributed.in_step([1, 2]) == [[1], [2]]
        tensor = torch.ones(2, requires_grad=True)
        assert distributed.replicated(tensor)[0] is tensor
        assert distributed.summed(tensor) is tensor
        distributed.merge_rows([tensor])
        distributed.barrier()
    assert tensor.tolist() == [1, 1]
