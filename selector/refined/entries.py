"""Which entries the next memory of the refined recipe has, and what they start from.

Shapes: K entries of the next memory, n questions, d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.errors import ConfigError, TaskDataError

from ..backbone.extraction import extract
from ..backbone.injection import Memory
from ..backbone.model import Backbone
from ..data.choice import k_center, pick
from ..data.examples import Example, entry_records
from ..update.inputs import TaskInputs
from ..update.measures import composition
from ..update.parametrization import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE
from .settings import RefinedSettings


@dataclass(frozen=True)
class EntryPlan:
    """The next memory's entries: rows of the previous memory, then examples of the new task."""

    kept: Tensor  # [number of old entries that stay] int64, rows of the previous memory, increasing
    chosen: list[int]  # rows of the training examples
    shares: dict[str, int]  # number of entries by task
    shrunk: frozenset[str]  # tasks that lose entries, and whose remaining entries must be trained again


def new_task(examples: Sequence[Example]) -> str:
    """The task of the examples.

    Raises:
        TaskDataError: they belong to several tasks.
    """
    names = sorted({example.task for example in examples})
    if len(names) > 1:
        raise TaskDataError(f"the refined recipe takes one task at a time, found {', '.join(map(repr, names))}")
    return names[0]


def plan_entries(inputs: TaskInputs, settings: RefinedSettings, keys: Tensor) -> EntryPlan:
    """Choose the entries by `settings.allocation`; `keys` [n, d] are the training examples'."""
    return (_plan_quotas if settings.allocation == "quotas" else _plan_jointly)(inputs, settings, keys)


def quotas(before: Mapping[str, int], task: str, *, budget: int, entries_per_task: int) -> dict[str, int]:
    """Number of entries by task, in the order of the stream, once the new task `task` has its own.

    Every task gets `entries_per_task`, halved for all tasks until the budget holds them. Halving changes the quotas
    rarely: 8 becomes 4 once, instead of 7, 6 and 5 on the way.

    Args:
        before: number of entries by task so far, without the new task.
        budget: B, of all tasks together.

    Raises:
        ConfigError: the budget is below one entry a task, or a number is below 1.
    """
    if entries_per_task < 1 or budget < 1:
        raise ConfigError(f"a task needs at least one entry: found {entries_per_task} a task, and a budget of {budget}")
    assert task not in before
    share = entries_per_task
    while share + sum(min(count, share) for count in before.values()) > budget:
        share //= 2
        if share == 0:
            raise ConfigError(f"the budget of {budget} is below one entry for each of {len(before) + 1} tasks")
    return {old: min(count, share) for old, count in before.items()} | {task: share}


def initial_memory(
    backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings, plan: EntryPlan
) -> tuple[Memory, tuple[EntryRecord, ...]]:
    """The K entries before training: old ones as stored, new ones as extracted, all in float32.

    New values of decoupled memory are 0, so that untrained entries change nothing (LLaMA-Adapter, arXiv 2303.16199).
    So are the outer halves of new maps; the inner ones are drawn from N(0, 1 / width).
    """
    examples = [inputs.training[row] for row in plan.chosen]
    extraction = extract(backbone, examples, settings.payload_tokens, batch_size=settings.batch_size)
    records = entry_records(examples)
    decoupled = settings.form == "decoupled"
    new = Memory(
        retrieval_keys=extraction.keys.half().float(),  # a bundle rounds its keys; train with rounded ones
        payload_keys=extraction.payload_keys,
        payload_values=torch.zeros_like(extraction.payload_values) if decoupled else extraction.payload_values,
        temperature=torch.tensor(INITIAL_TEMPERATURE),
        value_gates=torch.full((backbone.num_layers,), 1.0 if decoupled else INITIAL_VALUE_GATE),
        layer_bias=torch.zeros(backbone.num_layers),
        weighting=settings.weighting,
        form=settings.form,
        **initial_maps(backbone, settings, len(examples)),
    )
    if inputs.previous is None:
        return new, records
    old = Memory.from_bundle(inputs.previous)
    joined = replace(
        old,
        retrieval_keys=torch.cat([old.retrieval_keys[plan.kept], new.retrieval_keys]),
        payload_keys=torch.cat([old.payload_keys[:, plan.kept], new.payload_keys], dim=1),
        payload_values=torch.cat([old.payload_values[:, plan.kept], new.payload_values], dim=1),
        map_in=_joined(old.map_in, new.map_in, plan.kept),
        map_out=_joined(old.map_out, new.map_out, plan.kept),
    )
    entries = inputs.previous.metadata.entries
    return joined, tuple(entries[row] for row in plan.kept.tolist()) + records


def check_rank(backbone: Backbone, settings: RefinedSettings) -> None:
    """Raises ConfigError: the maps would have a higher rank than their width."""
    if settings.map_rank > (width := _map_width(backbone)):
        raise ConfigError(f"a map of width {width} has at most that rank, found map_rank {settings.map_rank}")


def _map_width(backbone: Backbone) -> int:
    """G D: the outputs of the query heads that share a KV head."""
    return backbone.num_heads // backbone.num_kv_heads * backbone.head_dim


def initial_maps(backbone: Backbone, settings: RefinedSettings, num_entries: int) -> dict[str, Tensor]:
    """map_in [L, entries, J, r, G D] and map_out [L, entries, J, G D, r] float32, or nothing."""
    if not settings.map_rank:
        return {}
    J, width = backbone.num_kv_heads, _map_width(backbone)
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (backbone.num_layers, num_entries, J, settings.map_rank, width)
    inner = torch.randn(shape, generator=generator) / math.sqrt(width)
    return {"map_in": inner, "map_out": torch.zeros_like(inner).transpose(-1, -2).contiguous()}


def _joined(old: Tensor | None, new: Tensor | None, kept: Tensor) -> Tensor | None:
    """The kept entries' tensor, then the new ones'; `check_previous` has seen that both memories have maps, or none."""
    return None if old is None or new is None else torch.cat([old[:, kept], new], dim=1)


def _plan_quotas(inputs: TaskInputs, settings: RefinedSettings, keys: Tensor) -> EntryPlan:
    """Keep the first entries of each old task, and choose as many examples as the new task's quota.

    Nested entries were trained to work without the rest of their quota, and are not trained again: training them on the
    few anchors forgets more than it gains.
    """
    entries = inputs.previous.metadata.entries if inputs.previous is not None else ()
    before = inputs.entries_by_task
    task = new_task(inputs.training)
    shares = quotas(before, task, budget=settings.budget, entries_per_task=settings.entries_per_task)
    shares[task] = min(shares[task], len(inputs.training))
    kept: list[int] = []
    for old in before:
        rows = [row for row, entry in enumerate(entries) if entry.task == old]
        kept += rows[: shares[old]]
    rng = np.random.default_rng((settings.seed, 6))
    chosen = pick(len(inputs.training), shares[task], settings.entry_policy, rng, keys)
    nested = inputs.previous is not None and inputs.previous.metadata.settings.get("nested", False)
    shrunk = frozenset(old for old, count in before.items() if shares[old] < count and not nested)
    return EntryPlan(torch.tensor(sorted(kept), dtype=torch.int64), chosen, shares, shrunk)


def _plan_jointly(inputs: TaskInputs, settings: RefinedSettings, keys: Tensor) -> EntryPlan:
    """Choose as many as the budget holds of all old entries and new examples, by their keys alone.

    The first choice is an example, so that the new task has an entry.
    """
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
    shares = composition([entries[row] for row in kept]) | {new_task(inputs.training): len(chosen)}
    return EntryPlan(torch.tensor(kept, dtype=torch.int64), chosen, shares, frozenset())
