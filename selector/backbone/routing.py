"""The relevance gate's rule for a batch: which requests use a memory, and which of its entries.

Shapes: n requests, B entries, C tasks of the gate, d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle, Gate
from inducekv_vllm.errors import ConfigError


def gated_prior(gate: Gate, entry_tasks: Sequence[str], query_keys: Tensor) -> tuple[Tensor, Tensor]:
    """The relevance gate for n requests; the rule is `inducekv_vllm.gate.RelevanceGate.decide`.

    Args:
        entry_tasks: the task of each of the B entries.
        query_keys: [n, 2, d], what `Backbone.query_keys` gives.

    Returns:
        open [n] bool: if False, the request runs without memory;
        log_prior [n, B] float32, for `Memory.terms`: 0 for the entries of the request's task, -inf for all others. The
        row of a request with a closed gate is its nearest task's, so that its unused terms are finite.

    Raises:
        ConfigError: query keys of another shape, or an entry of a task that the gate does not have.
    """
    if query_keys.ndim != 3 or query_keys.shape[1:] != gate.keys.shape[1:]:
        raise ConfigError(f"expected query keys [n, 2, {gate.keys.shape[2]}], found {list(query_keys.shape)}")
    if unknown := set(entry_tasks) - set(gate.tasks):
        raise ConfigError(f"entries of task {min(unknown)!r}, which the gate does not have")
    keys, thresholds = gate.keys.to(query_keys.device, torch.float64), gate.thresholds.to(query_keys.device)
    margins = torch.einsum("npd,cpd->nc", query_keys.double(), keys) - thresholds.double()  # [n, C]
    largest, nearest = margins.amax(dim=1), margins.argmax(dim=1)  # [n], [n]: ties go to the first
    task_of_entry = torch.tensor([gate.tasks.index(task) for task in entry_tasks], device=nearest.device)  # [B]
    other_task = task_of_entry != nearest[:, None]  # [n, B] bool
    log_prior = torch.zeros(other_task.shape, device=nearest.device).masked_fill(other_task, -math.inf)
    return largest >= 0, log_prior


def routing(bundle: Bundle, query_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Which of n requests use a bundle's memory, [n] bool, and the log prior of its entries, [n, B] float32.

    See `gated_prior`. Without a gate, every request uses all entries.
    """
    n, device = len(query_keys), query_keys.device
    if bundle.gate is None:
        return torch.ones(n, dtype=torch.bool, device=device), torch.zeros(n, bundle.num_entries, device=device)
    return gated_prior(bundle.gate, [entry.task for entry in bundle.metadata.entries], query_keys)


def routed_tasks(bundle: Bundle, log_prior: Tensor) -> list[str | None]:
    """The task that each of n requests is sent to, from `routing`'s log prior [n, B]; None without a gate."""
    if bundle.gate is None:
        return [None] * len(log_prior)
    return [bundle.metadata.entries[row].task for row in log_prior.argmax(dim=1).tolist()]
