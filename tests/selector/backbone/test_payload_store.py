"""The candidates' payloads on disk: the same numbers as in memory, in less memory, whatever happens on the way."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import Bundle, read_bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone.extraction import Extraction, extract
from selector.backbone.model import Backbone
from selector.backbone.payload_store import PayloadStore
from selector.backbone.scoring import Questions, Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.cli.select import main
from selector.data.examples import Example, read_task
from selector.paper.calibration import Calibration, leaf
from selector.paper.candidate_pool import CandidatePool
from selector.paper.objective import Objective
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings

M = 3


@pytest.fixture(scope="module")
def examples(task_file: Path) -> list[Example]:
    return read_task(task_file)


@pytest.fixture(scope="module")
def previous(llava: Backbone, examples: list[Example]) -> Bundle:
    return build_bundle(llava, examples[:2], BuildSettings(budget=4, payload_tokens=M))


def open_pool(folder: Path, backbone: Backbone, count: int, previous: Bundle | None = None) -> PayloadStore:
    total = count + (previous.num_entries if previous else 0)
    return PayloadStore.open(
        folder, (backbone.num_layers, total, backbone.num_kv_heads, M, backbone.head_dim), previous
    )


def in_memory(backbone: Backbone, examples: list[Example]) -> Extraction:
    return extract(backbone, examples, M, batch_size=4, payload_dtype=torch.float16)


def test_a_pool_on_disk_is_the_pool_in_memory(
    llava: Backbone, examples: list[Example], previous: Bundle, tmp_path: Path
) -> None:
    current = examples[2:]
    pool = open_pool(tmp_path / "pool", llava, len(current), previous)
    on_disk = extract(llava, current, M, batch_size=4, store=pool)
    expected = in_memory(llava, current)
    for name in ("query_keys", "payload_keys", "payload_values"):
        assert torch.equal(getattr(on_disk, name), getattr(expected, name))
    found, whole = (CandidatePool.join(previous, one, current) for one in (on_disk, expected))
    rows = torch.tensor([0, 1, 4, 11])
    for ours, theirs in ((found, whole), (found.take(rows), whole.take(rows))):
        assert (ours.records, ours.num_previous) == (theirs.records, theirs.num_previous)
        for name in ("keys", "payload_keys", "payload_values"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


def test_losses_and_gradients_over_the_mapped_pool_are_those_in_memory(
    llava: Backbone, examples: list[Example], tmp_path: Path
) -> None:
    pool = open_pool(tmp_path / "pool", llava, len(examples))
    results = []
    for extraction in (extract(llava, examples, M, batch_size=4, store=pool), in_memory(llava, examples)):
        candidates = CandidatePool.join(None, extraction, examples)
        questions = Questions(examples[:3], extraction.keys[:3])
        objective = Objective(Scorer(llava), candidates, questions, questions, 3, "sqrt", 8, 0)
        variables = leaf(torch.full((12,), 0.25, dtype=torch.float64)), leaf(Calibration.initial(3).phi)
        with tiled_attention(llava):
            loss = objective.current_loss(*variables, (0,))
            results.append((loss, *torch.autograd.grad(loss, variables)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_finished_pool_is_not_made_again(
    llava: Backbone, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = extract(llava, examples, M, store=open_pool(tmp_path / "pool", llava, len(examples)))

    def fail(*_: Any) -> None:
        raise AssertionError("the backbone was run again")

    monkeypatch.setattr(Backbone, "hidden_states", fail)
    again = extract(llava, examples, M, store=open_pool(tmp_path / "pool", llava, len(examples)))
    assert torch.equal(again.query_keys, first.query_keys)
    assert torch.equal(again.payload_values, first.payload_values)


@pytest.mark.parametrize("damage", ["query_keys.safetensors", "payload_values.f16", "half", "garbage"])
def test_a_pool_that_is_not_whole_is_made_again(
    llava: Backbone, examples: list[Example], tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "pool"
    expected = extract(llava, examples, M, store=open_pool(folder, llava, len(examples))).payload_values.clone()
    if damage == "half":
        os.truncate(folder / "payload_keys.f16", 100)
    elif damage == "garbage":
        (folder / "query_keys.safetensors").write_bytes(b"not safetensors")
    else:
        (folder / damage).unlink()
    pool = open_pool(folder, llava, len(examples))
    assert pool.query_keys() is None
    assert torch.equal(extract(llava, examples, M, store=pool).payload_values, expected)


def test_it_takes_less_memory_than_it_has_bytes(
    model_folders: dict[str, Path], task_file: Path, tmp_path: Path
) -> None:
    """In a process of its own, with the pool on disk and, to show that the measure sees it, in memory.

    Extraction and the shortlist by the process's peak, in which the system counts what is mapped; the pass over all
    candidates by a limit on private memory, in which it does not.
    """
    count, m, shortlist, limit = 160, 512, 8, 35 * 2**20
    (tmp_path / "pools").mkdir()

    def measure(*arguments: object) -> dict[str, Any]:
        run = [
            sys.executable,
            "-m",
            "tests.selector.backbone.payload_store_memory",
            str(model_folders["llava"]),
            str(task_file),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*run, *map(str, arguments)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    on_disk, in_ram = measure(tmp_path / "pools", count, m, shortlist, limit), measure("-", count, m, shortlist)
    assert on_disk["pool_bytes"] == in_ram["pool_bytes"] == 2 * 3 * count * 2 * m * 64 * 2
    assert limit < 0.3 * on_disk["pool_bytes"]
    assert in_ram["growth_bytes"] > 0.8 * in_ram["pool_bytes"]
    assert on_disk["growth_bytes"] < 0.25 * on_disk["pool_bytes"]
    assert on_disk["digest"] == in_ram["digest"]
    assert on_disk["loss_and_gradient"] == in_ram["loss_and_gradient"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses files above 32 KiB, as it refuses all on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_on_the_disk(llava: Backbone, tmp_path: Path, small_files: None) -> None:
    with pytest.raises(ConfigError, match=r"cannot keep the candidates' payloads here, 52\.7 MiB: .*File too large"):
        open_pool(tmp_path / "pool", llava, 12_000)
    assert not (tmp_path / "pool").exists()


def test_a_disk_that_fails_on_the_way(
    llava: Backbone, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, written = open_pool(tmp_path / "pool", llava, len(examples)), []
    write = PayloadStore._write

    def fail_late(self: PayloadStore, *arguments: Any) -> None:
        written.append(arguments)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        write(self, *arguments)

    monkeypatch.setattr(PayloadStore, "_write", fail_late)
    with pytest.raises(ConfigError, match=r"cannot keep the candidates' payloads here, .*No space left on device"):
        extract(llava, examples, M, batch_size=4, store=pool)
    assert not pool.folder.exists()


def test_a_bad_example_leaves_no_pool(llava: Backbone, examples: list[Example], tmp_path: Path) -> None:
    broken = [*examples[:3], replace(examples[3], images=(tmp_path / "missing.png",))]
    pool = open_pool(tmp_path / "pool", llava, 4)
    with pytest.raises(ValueError, match=r"'e3' of task 'colours'.*missing\.png"):
        extract(llava, broken, M, batch_size=2, store=pool)
    assert not pool.folder.exists()


def test_killed_while_it_extracts_it_ends_with_the_same_digest(
    model_folders: dict[str, Path], task_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "next.safetensors"
    arguments = [
        *("--model", str(model_folders["llava"]), "--task", str(task_file), "--output", str(output), "--full-pool"),
        *("--recipe", "paper"),
        *("--budget", "3", "--payload-tokens", "256", "--iterations", "1", "--inner-steps", "1"),
        *("--beta", "0.5", "--gamma", "0.1", "--batch-size", "1"),
    ]
    pool = tmp_path / ".next.safetensors.progress" / "pool"
    run = [sys.executable, "-m", "selector.cli.select", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (pool / "payload_values.f16").exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert pool.exists()
    assert not (pool / "query_keys.safetensors").exists(), "it was killed too late"
    assert main(arguments) == 0
    resumed = read_bundle(output).digest
    output.unlink()
    assert main(arguments) == 0
    assert read_bundle(output).digest == resumed
    assert not pool.parent.exists()
