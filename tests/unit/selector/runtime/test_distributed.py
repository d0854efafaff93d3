"""Two processes under torchrun against one: the same memory, the same errors, and nothing written twice."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import TaskDataError
from selector.backbone.extraction import extract, extract_keys
from selector.backbone.model import Backbone
from selector.backbone.payload_store import PayloadStore
from selector.backbone.scoring import Questions, Scorer
from selector.cli.select import main as select
from selector.data.anchors import AnchorStore
from selector.data.examples import Example, read_task
from selector.runtime.distributed import (
    all_reduce_sum,
    barrier,
    in_step,
    is_main,
    leave,
    merge_rows,
    process_group,
    rank,
    replicated,
    shard,
    summed,
    together,
    world_size,
)
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.gates import small_fits
from tests.unit.selector.stream import ENVIRONMENT, FIXED, PAPER, REFINED, SELECT, Stream, kill_when, without_plots

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
# Batches are split unevenly: five examples, and one anchor, which leaves a process without any.
SPLIT = ("--budget", "4", "--batch-size", "5", "--anchors-per-task", "3", "--iterations", "8", "--inner-steps", "2")
# Trained in float32: AdamW divides by the root of what it has seen, so rounding grows faster than elsewhere.
REFINED_SPLIT = (
    *REFINED,
    "--recipe",
    "refined",
    "--entries-per-task",
    "3",
    "--batch-size",
    "5",
    "--precision",
    "float32",
)
# Of float32 sums in another order and matrix products of another shape, after 8 outer and 16 inner steps that feed on
# each other; relative. Found: 2e-7.
TOLERANCE = 1e-5
ONE_STEP_OF_FLOAT16 = 2**-10  # should another number of threads move what is rounded to float16

Ended = subprocess.CompletedProcess[str]
MakeStream = Callable[[str], Stream]


def torchrun(*arguments: str) -> Ended:
    run = [sys.executable, "-m", *TORCHRUN, *arguments]
    return subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def make_stream(
    tmp_path_factory: pytest.TempPathFactory, llava: Backbone, model_folders: dict[str, Path], tasks: dict[str, Path]
) -> MakeStream:
    """A second task's update, with a previous memory and an anchor of the first task, in a folder of its own."""
    root = tmp_path_factory.mktemp("distributed")
    first, previous = read_task(tasks["colours"])[:3], root / "previous.safetensors"
    write_bundle(build_bundle(llava, first, BuildSettings(budget=4, payload_tokens=2)), previous)

    def make(name: str) -> Stream:
        anchors = root / name / "anchors"
        anchors.parent.mkdir()
        AnchorStore(anchors).append(first[:1], run="earlier", policy="random", seed=0)
        options = (*PAPER, *FIXED, *SPLIT, "--previous", str(previous), "--anchors", str(anchors))
        return Stream(anchors.parent, model_folders["llava"], tasks, options)

    return make


def refined(stream: Stream) -> Stream:
    """The refined recipe, without a previous memory."""
    return replace(stream, options=(*REFINED_SPLIT, "--seed", "3"))


@pytest.fixture(scope="module")
def alone(make_stream: MakeStream) -> Stream:
    """What one process makes: "counts" by the paper's recipe, "places" by the refined one."""
    stream = make_stream("alone")
    stream.update("counts")
    refined(stream).update("places")
    return stream


@pytest.fixture(scope="module")
def shared(make_stream: MakeStream, task_file: Path) -> tuple[Stream, Ended]:
    """The same by two processes, which check more together before, and are refused an update afterwards."""
    stream = make_stream("shared")
    commands = {
        "paper": stream.arguments("counts"),
        "refined": refined(stream).arguments("places"),
        "refused": make_stream("refused").arguments("counts", "--budget", "2"),
    }
    data = (str(stream.model), str(task_file), str(stream.folder), json.dumps(commands))
    return stream, torchrun(__name__, *data)


@pytest.fixture(scope="module")
def resumed(make_stream: MakeStream) -> tuple[Stream, Ended]:
    """By two processes that were killed, and started again."""
    stream = make_stream("killed")
    progress, arguments = stream.progress("counts"), (SELECT, *stream.arguments("counts"))
    kill_when(lambda: list(progress.glob("beta-*.safetensors")), *TORCHRUN, *arguments)
    time.sleep(1)
    state = {path.name: path.stat().st_mtime_ns for path in progress.iterdir()}
    time.sleep(1)
    assert {path.name: path.stat().st_mtime_ns for path in progress.iterdir()} == state, "a process is still writing"
    assert not stream.output("counts").exists()
    return stream, torchrun(*arguments)


def assert_both_print(ended: Ended, event: str) -> None:
    for process in range(2):
        assert f"process {process}: {event}\n" in ended.stdout, ended.stderr


def test_two_processes_make_the_memory_of_one(alone: Stream, shared: tuple[Stream, Ended]) -> None:
    stream, ended = shared
    assert_both_print(ended, "paper ended with 0")
    ours, theirs = stream.bundle("counts"), alone.bundle("counts")
    assert ours.metadata.entries == theirs.metadata.entries
    assert ours.metadata.settings == theirs.metadata.settings
    for name, tensor in theirs.tensors().items():
        tolerance = ONE_STEP_OF_FLOAT16 if tensor.dtype == torch.float16 else TOLERANCE
        torch.testing.assert_close(ours.tensors()[name], tensor, rtol=tolerance, atol=TOLERANCE)
    report, expected = stream.report("counts"), alone.report("counts")
    for measured, measured_alone in zip(report["history"], expected["history"], strict=True):
        assert measured == pytest.approx(measured_alone, rel=TOLERANCE)
    assert report["validation_nll"] == pytest.approx(expected["validation_nll"], rel=TOLERANCE)
    assert report["history"][-1]["temperature"] != pytest.approx(0.07, rel=10 * TOLERANCE), "nothing was fitted"
    anchors, anchors_alone = (AnchorStore(made.folder / "anchors").tasks() for made in (stream, alone))
    assert [task.digest for task in anchors] == [task.digest for task in anchors_alone]


def test_two_processes_refine_as_one_does(alone: Stream, shared: tuple[Stream, Ended]) -> None:
    stream, ended = shared
    assert_both_print(ended, "refined ended with 0")
    ours, theirs = stream.bundle("places"), alone.bundle("places")
    assert ours.metadata.entries == theirs.metadata.entries
    for rtol, atol, names in [
        (ONE_STEP_OF_FLOAT16, 1e-5, ("retrieval_keys",)),
        (1e-4, 1e-4, ("temperature", "value_gates", "layer_bias", "gate_center", "gate_scale")),
        (1e-2, 1e-3, ("payload_keys", "payload_values", "gate_prototypes", "gate_weights", "gate_thresholds")),
    ]:
        for name in names:
            torch.testing.assert_close(ours.tensors()[name], theirs.tensors()[name], rtol=rtol, atol=atol)


def test_an_error_is_printed_once_and_ends_all(shared: tuple[Stream, Ended]) -> None:
    stream, ended = shared
    assert_both_print(ended, "refused ended with 2")
    assert ended.returncode != 0
    errors = [line for line in ended.stderr.splitlines() if line.startswith("inducekv-select: error: ")]
    assert errors == ["inducekv-select: error: the budget of 2 is below the 3 entries of the previous tasks"]
    assert not list((stream.folder.parent / "refused").glob("*.safetensors"))


@pytest.mark.slow
def test_torchrun_killed_and_started_again_ends_with_the_same_digest(
    resumed: tuple[Stream, Ended], shared: tuple[Stream, Ended]
) -> None:
    """Its processes die with it, so that the next ones meet nobody."""
    stream, ended = resumed
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("resuming an earlier run") == 1
    assert stream.bundle("counts").digest == shared[0].bundle("counts").digest


def test_without_torchrun_nothing_happens() -> None:
    with process_group():
        assert (rank(), world_size(), is_main()) == (0, 1, True)
        assert shard([1, 2, 3]) == [1, 2, 3]
        assert in_step([1, 2]) == [[1], [2]]
        tensor = torch.ones(2, requires_grad=True)
        assert replicated(tensor)[0] is tensor
        assert summed(tensor) is tensor
        merge_rows([tensor])
        barrier()
    assert tensor.tolist() == [1, 1]


# What two processes do and check together: torchrun runs this file as a module.


def check_sums() -> None:
    assert world_size() == 2
    assert is_main() == (rank() == 0)
    assert shard([4, 5, 6]) == ([4, 6] if rank() == 0 else [5])
    assert in_step([4, 5, 6]) == ([[4], [6]] if rank() == 0 else [[5], []])
    total = torch.tensor([1.0 + rank(), 10.0])
    all_reduce_sum([total])
    assert total.tolist() == [3.0, 20.0]


def check_rows_are_merged_to_the_bit() -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        rows = torch.zeros(2, 2, dtype=dtype)
        rows[rank()] = torch.tensor([-0.0, 0.1 + rank()], dtype=dtype)
        merge_rows([rows, torch.empty(0, dtype=dtype)])
        expected = torch.tensor([[-0.0, 0.1], [-0.0, 1.1]], dtype=dtype)
        assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))


def check_gradients_of_any_order() -> None:
    """Two unrolled gradient steps, and the gradient through them, with one process's part and the other's."""
    w = torch.tensor([1.0, 0.8, 0.6], dtype=torch.float64, requires_grad=True)
    phi = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)

    def term(w: Tensor, phi: Tensor, row: int) -> Tensor:
        return (w[row] ** 3 * phi[0] ** 2).exp().log1p()

    def whole(w: Tensor, phi: Tensor) -> Tensor:
        return torch.stack([term(w, phi, row) for row in range(3)]).sum()

    def split(w: Tensor, phi: Tensor) -> Tensor:
        w, phi = replicated(w, phi)
        return summed(torch.stack([term(w, phi, row) for row in shard(range(3))]).sum())

    def hypergradient(loss) -> Tensor:
        moved = phi
        for _ in range(2):
            (gradient,) = torch.autograd.grad(loss(w, moved), moved, create_graph=True)
            moved = moved - 0.1 * gradient
        return torch.autograd.grad(loss(w, moved), w)[0]

    torch.testing.assert_close(split(w, phi), whole(w, phi), rtol=1e-14, atol=0)
    torch.testing.assert_close(hypergradient(split), hypergradient(whole), rtol=1e-13, atol=0)


def check_an_error_of_one_is_an_error_of_all() -> None:
    def fail(culprit: int) -> None:
        with together():
            if rank() == culprit:
                raise TaskDataError(f"example 'é' of process {culprit}")

    for culprit in range(2):
        with pytest.raises(TaskDataError, match=f"^example 'é' of process {culprit}$"):
            fail(culprit)
    with together():
        pass


def open_pool(backbone: Backbone, count: int, folder: Path) -> PayloadStore:
    shape = (backbone.num_layers, count, backbone.num_kv_heads, 2, backbone.head_dim)
    return PayloadStore.open(folder, shape, None)


def check_extraction_is_that_of_one_process(backbone: Backbone, examples: list[Example], folder: Path) -> None:
    """In memory and on disk, with an uneven number of batches."""
    entries, keys = extract(backbone, examples, 2, batch_size=5), extract_keys(backbone, examples, batch_size=5)
    for start in range(0, len(examples), 5):
        rows = slice(start, start + 5)
        inputs = backbone.collate([backbone.encode_example(example) for example in examples[rows]])
        assert torch.equal(entries.keys[rows], backbone.retrieval_keys(inputs))
        assert torch.equal(keys[rows], entries.keys[rows])
    pool = open_pool(backbone, len(examples), folder / "pool")
    on_disk = extract(backbone, examples, 2, batch_size=5, store=pool)
    assert torch.equal(on_disk.keys, entries.keys)
    assert torch.equal(on_disk.payload_keys, entries.payload_keys.half())
    assert torch.equal(on_disk.payload_values, entries.payload_values.half())
    assert entries.payload_keys.abs().amin(dim=(0, 2, 3, 4)).gt(0).all()  # every entry was filled in


def check_a_bad_example_ends_both(backbone: Backbone, examples: list[Example], folder: Path) -> None:
    """It is in the second process's batch; the pool is gone afterwards."""
    broken = [*examples[:3], replace(examples[3], images=(folder / "missing.png",))]
    pool = open_pool(backbone, 4, folder / "broken")
    with pytest.raises(TaskDataError, match=r"missing\.png"):
        extract(backbone, broken, 2, batch_size=2, store=pool)
    barrier()
    assert not pool.folder.exists()


def check_the_mean_loss_is_that_of_one_process(backbone: Backbone, examples: list[Example], folder: Path) -> None:
    scorer = Scorer(backbone, batch_size=5)
    found = scorer.mean_loss(Questions(examples, torch.zeros(len(examples), backbone.hidden_size)))
    with torch.no_grad():
        alone = [float(scorer.losses(examples[start : start + 5]).double().sum()) for start in (0, 5, 10)]
    torch.testing.assert_close(found, sum(alone) / len(examples), rtol=1e-12, atol=0)


CHECKS = (
    check_sums,
    check_rows_are_merged_to_the_bit,
    check_gradients_of_any_order,
    check_an_error_of_one_is_an_error_of_all,
)
CHECKS_OF_A_MODEL = (
    check_extraction_is_that_of_one_process,
    check_a_bad_example_ends_both,
    check_the_mean_loss_is_that_of_one_process,
)


@pytest.mark.parametrize("check", [*CHECKS, *CHECKS_OF_A_MODEL], ids=lambda check: check.__name__)
def test_what_two_processes_check_together(shared: tuple[Stream, Ended], check: Callable[..., None]) -> None:
    assert_both_print(shared[1], check.__name__)


def main() -> NoReturn:
    """What each process does. It prints the name of every check that has passed, and how the commands have ended.

    The arguments are a model folder, task data, an empty folder, and a JSON object: arguments of `inducekv-select` by a
    name. The commands run in this order, and the process ends with the last one's status.
    """
    model, task, folder, commands = sys.argv[1:]
    with process_group():
        given = (Backbone.load(model), read_task(Path(task)), Path(folder))
        for check in (*CHECKS, *CHECKS_OF_A_MODEL):
            check(*(given if check in CHECKS_OF_A_MODEL else ()))
            announce(check.__name__)
        # The commands work in this group, not in one of their own.
        no_group = mock.patch("selector.runtime.distributed.process_group", contextlib.nullcontext)
        with no_group, without_plots(), small_fits():
            for name, arguments in json.loads(commands).items():
                status = select(arguments)
                announce(f"{name} ended with {status}")
    leave(status)


def announce(event: str) -> None:
    """In one write: the other process prints to the same place."""
    sys.stdout.write(f"process {rank()}: {event}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
