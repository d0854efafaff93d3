"""The candidates' payloads on disk: the same numbers as in memory, in less memory, whatever happens on the way."""

from __future__ import annotations

import hashlib
import os
import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone import extraction
from selector.backbone.extraction import Extraction, extract
from selector.backbone.model import Backbone
from selector.backbone.payload_store import PayloadStore
from selector.backbone.scoring import Questions, Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.data.examples import Example, read_task
from selector.paper.calibration import Calibration, leaf
from selector.paper.candidate_pool import CandidatePool
from selector.paper.objective import Objective
from selector.runtime.phases import status_bytes
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings

M = 3
COUNT, LONG = 160, 512  # candidates and payload tokens of a pool that is large beside everything else
POOL_BYTES = 2 * 3 * COUNT * 2 * LONG * 64 * 2  # keys and values; layers, KV heads, head size and bytes of float16


@pytest.fixture(scope="module")
def previous(llava: Backbone, examples: list[Example]) -> Bundle:
    return build_bundle(llava, examples[:2], BuildSettings(budget=4, payload_tokens=M))


def open_pool(folder: Path, backbone: Backbone, count: int, previous: Bundle | None = None, m: int = M) -> PayloadStore:
    total = count + (previous.num_entries if previous else 0)
    shape = (backbone.num_layers, total, backbone.num_kv_heads, m, backbone.head_dim)
    return PayloadStore.open(folder, shape, previous)


def in_memory(backbone: Backbone, examples: list[Example]) -> Extraction:
    return extract(backbone, examples, M, batch_size=4, payload_dtype=torch.float16)


def test_a_pool_on_disk_is_the_pool_in_memory(
    llava: Backbone, examples: list[Example], previous: Bundle, tmp_path: Path
) -> None:
    current = examples[2:]
    pool = open_pool(tmp_path / "pool", llava, len(current), previous)
    on_disk = extract(llava, current, M, batch_size=4, store=pool)
    expected = in_memory(llava, current)
    for name in ("keys", "payload_keys", "payload_values"):
        assert torch.equal(getattr(on_disk, name), getattr(expected, name))
    found, whole = (CandidatePool.join(previous, one, current) for one in (on_disk, expected))
    rows = torch.tensor([0, 1, 4, 11])
    for ours, theirs in ((found, whole), (found.take(rows), whole.take(rows))):
        assert (ours.records, ours.num_previous) == (theirs.records, theirs.num_previous)
        for name in ("keys", "payload_keys", "payload_values"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


def test_a_finished_pool_is_not_made_again(
    llava: Backbone, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = extract(llava, examples, M, store=open_pool(tmp_path / "pool", llava, len(examples)))

    def fail(*_: Any) -> None:
        raise AssertionError("the backbone was run again")

    monkeypatch.setattr(Backbone, "hidden_states", fail)
    again = extract(llava, examples, M, store=open_pool(tmp_path / "pool", llava, len(examples)))
    assert torch.equal(again.keys, first.keys)
    assert torch.equal(again.payload_values, first.payload_values)


@pytest.mark.parametrize("damage", ["retrieval_keys-0.safetensors", "payload_values.f16", "half", "garbage"])
def test_a_pool_that_is_not_whole_is_made_again(
    llava: Backbone, examples: list[Example], tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "pool"
    expected = extract(llava, examples, M, store=open_pool(folder, llava, len(examples))).payload_values.clone()
    if damage == "half":
        os.truncate(folder / "payload_keys.f16", 100)
    elif damage == "garbage":
        (folder / "retrieval_keys-0.safetensors").write_bytes(b"not safetensors")
    else:
        (folder / damage).unlink()
    pool = open_pool(folder, llava, len(examples))
    assert len(pool.retrieval_keys()) == 0
    assert torch.equal(extract(llava, examples, M, store=pool).payload_values, expected)


def test_extraction_goes_on_after_the_last_whole_shard(
    llava: Backbone, examples: list[Example], previous: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the third of five batches, of which two make a shard; then shards are lost."""
    monkeypatch.setattr(extraction, "SHARD", 4)
    current, run, passes = examples[2:12], Backbone.hidden_states, []

    def interrupted(self: Backbone, inputs: Any) -> torch.Tensor:
        passes.append(inputs)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return run(self, inputs)

    monkeypatch.setattr(Backbone, "hidden_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(llava, current, M, batch_size=2, store=open_pool(tmp_path / "pool", llava, 10, previous))
    expected = extract(llava, current, M, batch_size=2, payload_dtype=torch.float16)
    for missing, needed in (((), 3), (("retrieval_keys-8.safetensors",), 1), (("retrieval_keys-4.safetensors",), 3)):
        for name in missing:
            (tmp_path / "pool" / name).unlink()
        before = len(passes)
        found = extract(llava, current, M, batch_size=2, store=open_pool(tmp_path / "pool", llava, 10, previous))
        assert len(passes) - before == needed
        for name in ("keys", "payload_keys", "payload_values"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


def candidates_of(examples: list[Example], backbone: Backbone, folder: Path | None) -> CandidatePool:
    """Long ones, in `folder` or in memory."""
    pool = open_pool(folder, backbone, len(examples), m=LONG) if folder else None
    extracted = extract(backbone, examples, LONG, payload_dtype=torch.float16, store=pool)
    return CandidatePool.join(None, extracted, examples)


def loss_and_gradients(backbone: Backbone, candidates: CandidatePool, examples: list[Example]) -> list[Any]:
    """Under all candidates with equal weights; the gradients by the weights and by the calibration."""
    questions = Questions(examples[:2], candidates.keys[:2])
    objective = Objective(Scorer(backbone), candidates, questions, questions, 4, "sqrt", 2, 0)
    weights = leaf(torch.full((len(candidates),), 4 / len(candidates), dtype=torch.float64))
    phi = leaf(Calibration.initial(backbone.num_layers).phi)
    with tiled_attention(backbone):
        loss = objective.current_loss(weights, phi, (0,))
        gradients = torch.autograd.grad(loss, (weights, phi))
    return [tensor.tolist() for tensor in (loss, *gradients)]


def measure(model: Path, task: Path, folder: Path | None, limit: int | None) -> tuple[int, list[Any]]:
    """What a pool in `folder`, or in memory, adds to this process's peak of memory; and numbers that it leads to.

    With a limit the system refuses more than so many bytes of private memory beyond what a first small pool has needed;
    maps of files are no private memory.
    """
    torch.set_num_threads(1)
    backbone, examples = Backbone.load(model), read_task(task)
    many = [replace(examples[number % len(examples)], id=f"c{number}") for number in range(COUNT)]
    # What loading and the first passes allocate is not the pool's.
    loss_and_gradients(backbone, candidates_of(many[:16], backbone, folder and folder / "first"), many)
    if limit:
        allowed = status_bytes("VmData") + limit
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    before = status_bytes("VmHWM")
    candidates = candidates_of(many, backbone, folder and folder / "all")
    taken = candidates.take(torch.arange(0, COUNT, COUNT // 8))
    growth = status_bytes("VmHWM") - before
    assert candidates.payload_keys.nbytes + candidates.payload_values.nbytes == POOL_BYTES
    digest = hashlib.sha256()
    for tensor in (taken.keys, taken.payload_keys, taken.payload_values):
        digest.update(tensor.numpy().tobytes())
    return growth, [digest.hexdigest(), *loss_and_gradients(backbone, candidates, many)]


@pytest.mark.slow
def test_it_takes_less_memory_than_it_has_bytes(
    model_folders: dict[str, Path], task_file: Path, tmp_path: Path
) -> None:
    """In a process of its own, with the pool on disk and, to show that the measure sees it, in memory.

    Extraction and the shortlist by the process's peak, in which the system counts what is mapped; the pass over all
    candidates by a limit on private memory, in which it does not.
    """
    limit = 35 * 2**20
    assert limit < 0.3 * POOL_BYTES

    def in_a_process(*arguments: Any) -> tuple[int, list[Any]]:
        with ProcessPoolExecutor(1, get_context("spawn")) as executor:
            return executor.submit(measure, model_folders["llava"], task_file, *arguments).result()

    growth_on_disk, numbers_on_disk = in_a_process(tmp_path, limit)
    growth_in_memory, numbers_in_memory = in_a_process(None, None)
    assert growth_in_memory > 0.8 * POOL_BYTES
    assert growth_on_disk < 0.25 * POOL_BYTES
    assert numbers_on_disk == numbers_in_memory


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
