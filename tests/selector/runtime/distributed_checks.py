"""What two processes do and check together; `test_distributed` starts it once, with torchrun, for several tests.

torchrun --nproc-per-node 2 -m tests.selector.runtime.distributed_checks MODEL TASK.jsonl FOLDER COMMANDS

Each process prints the name of every check that has passed. COMMANDS is a JSON object: arguments of `inducekv-select`
by a name. They are run in this order, and the process ends with the last one's status.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor

from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.backbone.extraction import extract, extract_keys
from selector.backbone.model import Backbone
from selector.backbone.payload_store import PayloadStore
from selector.backbone.scoring import Questions, Scorer
from selector.cli.select import main as select
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
        assert torch.equal(entries.query_keys[rows], backbone.query_keys(inputs))
        assert torch.equal(keys[rows], backbone.retrieval_keys(inputs))
    pool = open_pool(backbone, len(examples), folder / "pool")
    on_disk = extract(backbone, examples, 2, batch_size=5, store=pool)
    assert torch.equal(on_disk.query_keys, entries.query_keys)
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


def check_a_full_disk_ends_both(backbone: Backbone, examples: list[Example], folder: Path) -> None:
    """Only the main process takes the space."""
    with pytest.raises(ConfigError, match="cannot keep the candidates' payloads here"):
        PayloadStore.open(folder / "too large", (1, 2**31, 8, 2**10, 2**10), None)
    barrier()
    assert not (folder / "too large").exists()


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
    check_a_full_disk_ends_both,
    check_the_mean_loss_is_that_of_one_process,
)


def main() -> NoReturn:
    model, task, folder, commands = sys.argv[1:]
    with process_group():
        given = (Backbone.load(model), read_task(Path(task)), Path(folder))
        for check in CHECKS:
            check()
            report(check.__name__)
        for check in CHECKS_OF_A_MODEL:
            check(*given)
            report(check.__name__)
        # The commands work in this group, not in one of their own.
        with mock.patch("selector.runtime.distributed.process_group", contextlib.nullcontext):
            for name, arguments in json.loads(commands).items():
                status = select(arguments)
                report(f"{name} ended with {status}")
    leave(status)


def report(event: str) -> None:
    print(f"process {rank()}: {event}", flush=True)


if __name__ == "__main__":
    main()
