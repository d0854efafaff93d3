"""Memories without selection and without training: entries at random, or spread by k-center, as they are extracted.

Every task has an equal quota of the budget. An earlier task keeps entries of the previous memory: for each new task,
the same policy chooses which of them stay.

Shapes: B entries of the budget, n tasks seen so far, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.research.continual.methods.memory import BUNDLE
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from selector.backbone.extraction import extract, extract_keys
from selector.backbone.model import Backbone
from selector.data.examples import Example
from selector.paper.candidate_pool import CandidatePool
from selector.update.measures import composition, memory_bytes
from selector.update.parametrization import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE

Policy = Literal["random", "k-center"]


@dataclass(frozen=True)
class Built:
    """Entries by a policy alone, with the paper's starting calibration."""

    kind: ClassVar[Kind] = "bundle"

    name: str
    policy: Policy
    temperature: float = INITIAL_TEMPERATURE
    payload_tokens: int = 8
    batch_size: int = 8

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        before = None if previous is None else read_bundle(previous / BUNDLE)
        *earlier, own = shares(context.budget, context.number + 1)
        chosen = [task.train[row] for row in self._chosen(backbone, task.train, own, context.seed)]
        fresh = extract(backbone, chosen, self.payload_tokens, batch_size=self.batch_size, payload_dtype=torch.float16)
        pool = CandidatePool.join(before, fresh, chosen)
        kept = [] if before is None else self._kept(before, earlier, context)
        selected = pool.take(torch.tensor([*kept, *range(pool.num_previous, len(pool))]))
        bundle = Bundle.create(
            retrieval_keys=selected.keys,
            payload_keys=selected.payload_keys,
            payload_values=selected.payload_values,
            temperature=self.temperature,
            value_gates=torch.full((backbone.num_layers,), INITIAL_VALUE_GATE),
            layer_bias=torch.zeros(backbone.num_layers),
            backbone=backbone.fingerprint,
            budget=context.budget,
            entries=selected.records,
            weighting="sqrt",
            recipe="build",
            settings={"policy": self.policy, "temperature": self.temperature, "seed": context.seed},
            parent_digest=None if before is None else before.digest,
        )
        write_bundle(bundle, out / BUNDLE)
        report = {"digest": bundle.digest, "composition": composition(selected.records)}
        return Artifact("bundle", BUNDLE, memory_bytes(bundle), report)

    def _chosen(self, backbone: Backbone, examples: Sequence[Example], count: int, seed: int) -> list[int]:
        if len(examples) <= count:
            return list(range(len(examples)))
        keys = extract_keys(backbone, examples, batch_size=self.batch_size) if self.policy == "k-center" else None
        return pick(len(examples), count, self.policy, np.random.default_rng(seed), keys)

    def _kept(self, before: Bundle, quotas: list[int], context: RunContext) -> list[int]:
        """Rows of the previous memory that stay, rising: of each task as many as its new quota."""
        entries = before.metadata.entries
        rng = np.random.default_rng((context.seed, context.number))
        kept: list[int] = []
        for task, quota in zip(composition(entries), quotas, strict=True):
            rows = [row for row, entry in enumerate(entries) if entry.task == task]
            keys = before.retrieval_keys[rows].float()  # [len(rows), d]
            kept += [rows[place] for place in pick(len(rows), min(quota, len(rows)), self.policy, rng, keys)]
        return sorted(kept)


def shares(budget: int, tasks: int) -> list[int]:
    """B entries over n tasks, as equal as possible; the first tasks get the remainder. No share ever grows."""
    return [-(-(budget - number) // tasks) for number in range(tasks)]


def pick(N: int, count: int, policy: Policy, rng: np.random.Generator, keys: Tensor | None) -> list[int]:
    """`count` of N rows, at most N, rising; those of the largest spread by `keys` [N, d] for "k-center"."""
    if policy == "random":
        return sorted(rng.choice(N, count, replace=False).tolist())
    assert keys is not None
    return sorted(k_center(keys, count, first=int(rng.integers(N))))


def k_center(keys: Tensor, count: int, first: int) -> list[int]:
    """Greedy farthest-first traversal: each next key is the one least similar to all chosen so far.

    Args:
        keys: [N, d], unit norm, so that the largest distance is the smallest inner product.
        count: how many to choose, at most N.
        first: where to begin.

    Returns:
        `count` distinct rows in the order chosen; ties go to the first.
    """
    matrix = keys.numpy()
    chosen = [first]
    nearest = matrix @ matrix[first]  # [N]: similarity to the nearest chosen key
    nearest[first] = np.inf
    while len(chosen) < count:
        farthest = int(nearest.argmin())
        chosen.append(farthest)
        nearest = np.maximum(nearest, matrix @ matrix[farthest])
        nearest[farthest] = np.inf
    return chosen
