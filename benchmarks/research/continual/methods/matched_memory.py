"""A memory of attention matching: training examples as one conversation, compacted as a document is.

Every task has an equal part of the budget from the start. Nothing is trained and no gate chooses: the memory is one
entry with the tokens of all tasks.

Shapes: m tokens of a task, L layers, J KV heads, D and V sizes of a key and a value, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.research.continual.methods.memory import BUNDLE
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle import Bundle, EntryRecord, read_bundle, write_bundle
from inducekv_vllm.errors import TaskDataError
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from selector.document.compaction import Compacted, Part, compacted
from selector.document.references import conversation
from selector.document.text import Block, read
from selector.imported.bundle import untrained_bundle
from selector.update.measures import memory_bytes

MOST_SHOWN = 2048  # tokens of examples that are compacted, and that ask about them, each at most


@dataclass(frozen=True)
class Matched:
    """Keys and values of examples, compacted for the questions of other examples."""

    kind: ClassVar[Kind] = "bundle"

    name: str = "matched_memory"
    payload_tokens: int = 8  # of an entry of the budget

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        found = matched(backbone, task.train, context.budget // context.num_tasks * self.payload_tokens)
        before = None if previous is None else read_bundle(previous / BUNDLE)
        bundle = bundle_of(backbone, found, before, task.name)
        write_bundle(bundle, out / BUNDLE)
        report = {"digest": bundle.digest, "lost": float(found.lost.mean())}
        return Artifact("bundle", BUNDLE, memory_bytes(bundle), report)


def matched(backbone: Backbone, examples: Sequence[Example], m: int) -> Compacted:
    """m tokens for one half of the examples; the other half asks.

    Raises:
        TaskDataError: an example has pictures, or the shown ones have fewer tokens.
    """
    if any(example.images for example in examples):
        raise TaskDataError("attention matching shows examples as text, found pictures")
    most = min(MOST_SHOWN, Scorer(backbone).context // 2)
    shown, asking = (_within(backbone, examples[half::2], most) for half in range(2))
    ids = torch.cat(shown)
    if len(ids) < m:
        raise TaskDataError(f"the examples that are shown have {len(ids)} tokens, expected the memory's {m} at least")
    (memory,) = read(backbone, [Block(ids, "", [])])
    return compacted(backbone, [Part(memory, asking, m)])


def bundle_of(backbone: Backbone, found: Compacted, before: Bundle | None, task: str) -> Bundle:
    """One entry of merged memory, behind the tokens of earlier tasks."""
    keys, values = found.keys[:, None].half(), found.values[:, None].half()  # [L, 1, J, m, D] and [L, 1, J, m, V]
    if before is not None:
        keys = torch.cat([before.payload_keys, keys], dim=3)
        values = torch.cat([before.payload_values, values], dim=3)
    return untrained_bundle(
        backbone,
        keys,
        values,
        [EntryRecord(id=f"{task}/0", task=task, source_digest="0" * 64)],
        parent_digest=None if before is None else before.digest,
        recipe="matched",
        settings={},
    )


def _within(backbone: Backbone, examples: Sequence[Example], most: int) -> list[Tensor]:
    """The first examples with their answers, [T] int64 each, so many tokens in all."""
    found, total = list[Tensor](), 0
    for example in examples:
        ids = conversation(backbone, [*example.messages, message("assistant", example.answer)])
        if found and total + len(ids) > most:
            break
        found.append(ids)
        total += len(ids)
    return found
