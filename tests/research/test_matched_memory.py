"""A memory of attention matching keeps what it has of earlier tasks, and an equal part of the budget for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.research.continual.methods.matched_memory import Matched, matched
from benchmarks.research.continual.methods.memory import BUNDLE
from benchmarks.research.continual.methods.method import RunContext
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import TaskDataError
from selector.backbone.model import Backbone
from selector.data.examples import Example
from selector.data.given import read
from tests.tiny_models import save_tiny_llama

BUDGET = 4  # entries of 8 tokens for two tasks: 16 tokens each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


def examples(word: str) -> tuple[Example, ...]:
    rows = [{"prompt": f"Which {word} has number {at}?", "answer": f"the {word} of {at}"} for at in range(8)]
    return tuple(read(rows))


def test_each_task_has_its_part_and_earlier_ones_stay(folder: Path, tmp_path: Path) -> None:
    states = [tmp_path / name for name in ("first", "second")]
    for number, state in enumerate(states):
        state.mkdir()
        context = RunContext(folder, BUDGET, 0, number, 2)
        task = TaskData(f"task {number}", examples(("valve", "pump")[number]))
        Matched().learn(task, states[0] if number else None, state, context)
    first, second = (read_bundle(state / BUNDLE) for state in states)
    assert (first.payload_tokens, second.payload_tokens) == (16, 32)
    for name in ("payload_keys", "payload_values"):
        assert torch.equal(getattr(second, name)[..., :16, :], getattr(first, name))
    assert second.metadata.parent_digest == first.digest


def test_less_than_the_memory_is_refused(folder: Path) -> None:
    with pytest.raises(TaskDataError, match="expected the memory's 9999 at least"):
        matched(Backbone.load(folder), examples("valve"), 9999)
