"""Which entries the next memory of the refined recipe has, and what they start from.

Letters: K entries of the next memory, n questions, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.errors import TaskDataError

from ..backbone.extraction import extract
from ..backbone.injection import Memory
from ..backbone.model import Backbone
from ..data.examples import Example, entry_records
from ..update.build import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE, k_center, pick
from ..update.inputs import TaskInputs
from ..update.measures import composition
from .quotas import quotas
from .settings import RefinedSettings


@dataclass(frozen=True)
class QueryKeys:
    """Query keys [n, 2, d] of everything that is asked."""

    training: Tensor
    validation: Tensor
    anchors: Tensor
    base: Tensor


@dataclass(frozen=True)
class Plan:
    """Which entries the next memory has: rows of the previous memory, then the arriving task's examples."""

    kept: Tensor  # [number of old entries that stay] int64, rows of the previous memory, rising
    chosen: list[int]  # rows of the training examples
    shares: dict[str, int]  # entries by task
    shrunk: frozenset[str]  # tasks that lose entries, and whose others were not trained to do alone: now they are


def arriving_task(examples: Sequence[Example]) -> str:
    """The one task that all examples are of.

    Raises:
        TaskDataError: there are several.
    """
    names = sorted({example.task for example in examples})
    if len(names) > 1:
        raise TaskDataError(f"the refined recipe takes one task at a time, found {', '.join(map(repr, names))}")
    return names[0]


def plan_entries(inputs: TaskInputs, settings: RefinedSettings, known: QueryKeys) -> Plan:
    """By the settings' allocation."""
    return (_by_quotas if settings.allocation == "quotas" else _jointly)(inputs, settings, known)


def _by_quotas(inputs: TaskInputs, settings: RefinedSettings, known: QueryKeys) -> Plan:
    """The first entries of a task whose quota has shrunk, and as many examples as the arriving task's quota.

    What stays of nested quotas was trained to do alone, and is not trained again: anchors are few, and entries that are
    trained on them forget more than they make up for.
    """
    entries = inputs.previous.metadata.entries if inputs.previous is not None else ()
    before = inputs.held
    task = arriving_task(inputs.training)
    shares = quotas(before, task, budget=settings.budget, entries_per_task=settings.entries_per_task)
    shares[task] = min(shares[task], len(inputs.training))
    kept: list[int] = []
    for old in before:
        rows = [row for row, entry in enumerate(entries) if entry.task == old]
        kept += rows[: shares[old]]
    rng = np.random.default_rng((settings.seed, 6))
    keys = known.training[:, 0].contiguous()
    chosen = pick(len(inputs.training), shares[task], settings.entry_policy, rng, keys)
    alone = inputs.previous is not None and inputs.previous.metadata.settings.get("nested", False)
    shrunk = frozenset(old for old, count in before.items() if shares[old] < count and not alone)
    return Plan(torch.tensor(sorted(kept), dtype=torch.int64), chosen, shares, shrunk)


def _jointly(inputs: TaskInputs, settings: RefinedSettings, known: QueryKeys) -> Plan:
    """As many as the budget holds of all entries and examples together, by their keys alone.

    The first is an example, so that the arriving task has an entry.
    """
    keys = known.training[:, 0]
    if inputs.previous is not None:
        keys = torch.cat([inputs.previous.retrieval_keys.float(), keys])
    num_old, count = len(keys) - len(inputs.training), min(settings.budget, len(keys))
    rng = np.random.default_rng((settings.seed, 6))
    first = num_old + int(rng.integers(len(inputs.training)))
    if settings.entry_policy == "random":
        others = np.delete(np.arange(len(keys)), first)
        rows = [first, *rng.choice(others, count - 1, replace=False).tolist()]
    else:
        rows = k_center(keys, count, first)
    kept = sorted(row for row in rows if row < num_old)
    chosen = sorted(row - num_old for row in rows if row >= num_old)
    entries = inputs.previous.metadata.entries if inputs.previous is not None else ()
    shares = composition([entries[row] for row in kept]) | {arriving_task(inputs.training): len(chosen)}
    return Plan(torch.tensor(kept, dtype=torch.int64), chosen, shares, frozenset())


def starting_memory(
    backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings, plan: Plan
) -> tuple[Memory, tuple[EntryRecord, ...]]:
    """The K entries before refinement: old ones as stored, new ones as extracted, all in float32."""
    examples = [inputs.training[row] for row in plan.chosen]
    fresh = extract(backbone, examples, settings.payload_tokens, batch_size=settings.batch_size)
    records = entry_records(examples)
    # A bundle rounds its keys: training sees them rounded alike.
    memory = Memory(
        retrieval_keys=fresh.keys.half().float(),
        payload_keys=fresh.payload_keys,
        payload_values=fresh.payload_values,
        temperature=torch.tensor(INITIAL_TEMPERATURE),
        value_gates=torch.full((backbone.num_layers,), INITIAL_VALUE_GATE),
        layer_bias=torch.zeros(backbone.num_layers),
        weighting=settings.weighting,
    )
    if inputs.previous is None:
        return memory, records
    old = Memory.from_bundle(inputs.previous)
    joined = replace(
        old,
        retrieval_keys=torch.cat([old.retrieval_keys[plan.kept], memory.retrieval_keys]),
        payload_keys=torch.cat([old.payload_keys[:, plan.kept], memory.payload_keys], dim=1),
        payload_values=torch.cat([old.payload_values[:, plan.kept], memory.payload_values], dim=1),
    )
    entries = inputs.previous.metadata.entries
    return joined, tuple(entries[row] for row in plan.kept.tolist()) + records
