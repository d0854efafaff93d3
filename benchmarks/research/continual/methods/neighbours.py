"""Methods in which no model learns anything: nothing at all, or stored examples that are found by their query keys.

The latter keep examples within the bytes of the memory, in equal shares for all tasks of the stream.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.exemplars import EXEMPLARS, KEYS, Neighbours, content_bytes, number_that_fit
from benchmarks.lora_adapter import memory_bytes
from benchmarks.question_keys import Key, question_keys
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.backbone.footprint import FLOAT16_BYTES
from inducekv_vllm.errors import ConfigError
from selector.backbone.model import Backbone
from selector.data.anchors import AnchorStore
from selector.data.examples import Example


@dataclass(frozen=True)
class NoMemory:
    """Learns nothing."""

    kind: ClassVar[Kind] = "none"
    name: str = "no_memory"

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        return Artifact("none", None, 0, {})


@dataclass(frozen=True)
class PromptReplay:
    """Exemplars of the tasks stand before the question as earlier turns (paper, "Compute-Matched Retrieval").

    Stored are exemplars with their pictures and their query keys; the model stays as it is. Before a question stand the
    nearest exemplars, the nearest last, as many as the model's context holds.
    """

    kind: ClassVar[Kind] = "exemplars"
    name: str = "prompt_replay"
    key: Key = "paper"
    shown: int = 4  # exemplars before a question
    payload_tokens: int = 8  # m of the memory whose bytes may be taken

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        allowed = memory_bytes(backbone, context.budget, self.payload_tokens, context.num_tasks)
        kept = share_of_task(backbone, task, [content_bytes(example) for example in task.train], allowed, context)
        neighbours = Neighbours.before(previous, backbone, self.shown, self.key).after(
            question_keys(backbone, kept, self.key)
        )
        neighbours.write(out / KEYS)
        if previous is not None:
            shutil.copytree(previous / EXEMPLARS, out / EXEMPLARS)
        store = AnchorStore(out / EXEMPLARS)
        store.append(kept)
        stored = neighbours.stored_bytes + sum(map(content_bytes, store.read()))
        report = {"exemplars": len(neighbours), "of_this_task": len(kept), "bytes_allowed": allowed}
        return Artifact("exemplars", EXEMPLARS, stored, report)


@dataclass(frozen=True)
class KnnCopier:
    """The sanity floor: copies the most common answer of the nearest stored questions. No model answers anything.

    Stored are query keys and answers. A method that is not better has learned no more than to look up.
    """

    kind: ClassVar[Kind] = "copier"
    name: str = "knn_copier"
    key: Key = "paper"
    k: int = 5
    payload_tokens: int = 8  # m of the memory whose bytes may be taken

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        allowed = memory_bytes(backbone, context.budget, self.payload_tokens, context.num_tasks)
        kept = share_of_task(backbone, task, [len(e.answer.encode()) for e in task.train], allowed, context)
        neighbours = Neighbours.before(previous, backbone, self.k, self.key).after(
            question_keys(backbone, kept, self.key), [example.answer for example in kept]
        )
        neighbours.write(out / KEYS)
        report = {"examples": len(neighbours), "of_this_task": len(kept), "bytes_allowed": allowed}
        return Artifact("copier", KEYS, neighbours.stored_bytes, report)


def share_of_task(
    backbone: Backbone, task: TaskData, content: Sequence[int], allowed: int, context: RunContext
) -> list[Example]:
    """Training examples for the task's share of `allowed` bytes; each takes its `content` bytes and a float16 key."""
    sizes = [size + FLOAT16_BYTES * backbone.hidden_size for size in content]
    return drawn(task.train, sizes, allowed // context.num_tasks, (context.seed, context.number))


def drawn(examples: Sequence[Example], sizes: Sequence[int], allowed: int, seed: tuple[int, ...]) -> list[Example]:
    """Examples drawn at random into `allowed` bytes, in their own order. Raises ConfigError: not even one fits."""
    order = np.random.default_rng(seed).permutation(len(examples)).tolist()
    count = number_that_fit((sizes[row] for row in order), allowed)
    if not count:
        raise ConfigError(
            f"an example of the task {examples[0].task!r} takes {sizes[order[0]]} bytes where it is stored, "
            f"the budget allows {allowed} for each task"
        )
    return [examples[row] for row in sorted(order[:count])]
