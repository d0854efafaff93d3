"""The relevance gate's rule for a batch: which requests use a memory, and which of its entries.

Shapes: n requests, B entries, C tasks of the gate, H evidence of a request.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle, Gate
from inducekv_vllm.gate import GateDecision


def decisions(gate: Gate, evidence: Tensor) -> list[GateDecision]:
    """The gate's decision for each of n requests with evidence [n, H]."""
    rule = gate.rule
    return [rule.decide(each) for each in evidence.double().cpu().numpy()]


def gated_prior(gate: Gate, entry_tasks: Sequence[str], evidence: Tensor) -> tuple[Tensor, Tensor]:
    """The relevance gate for n requests; the rule is `inducekv_vllm.gate.RelevanceGate.decide`.

    Args:
        entry_tasks: the task of each of the B entries.
        evidence: [n, H], what `token_values.evidence_of` gives.

    Returns:
        open [n] bool: if False, the request runs without memory, as it does if its task has facts alone;
        log_prior [n, B] float32, for `TensorMemory.terms`: 0 for the entries of the request's task, -inf for all
        others. The row of a request without memory is that of the nearest task with entries, so that its unused terms
        are finite.
    """
    with_entries = set(entry_tasks)
    found = decisions(gate, evidence)
    opened = torch.tensor([decision.task in with_entries for decision in found], dtype=torch.bool)  # [n]
    margins = torch.tensor(np.array([decision.margins for decision in found]))  # [n, C]
    margins[:, [task not in with_entries for task in gate.tasks]] = -math.inf
    task_of_entry = torch.tensor([gate.tasks.index(task) for task in entry_tasks], dtype=torch.int64)  # [B]
    other_task = task_of_entry != margins.argmax(dim=1)[:, None]  # [n, B] bool
    log_prior = torch.zeros(other_task.shape).masked_fill(other_task, -math.inf)
    return opened.to(evidence.device), log_prior.to(evidence.device)


def routing(bundle: Bundle, evidence: Tensor) -> tuple[Tensor, Tensor]:
    """Which of n requests use a bundle's memory, [n] bool, and the log prior of its entries, [n, B] float32.

    See `gated_prior`. Without a gate, every request uses all entries, and `evidence` only says how many there are.
    """
    n, device = len(evidence), evidence.device
    if not bundle.num_entries:
        return torch.zeros(n, dtype=torch.bool, device=device), torch.zeros(n, 0, device=device)
    if bundle.gate is None:
        return torch.ones(n, dtype=torch.bool, device=device), torch.zeros(n, bundle.num_entries, device=device)
    return gated_prior(bundle.gate, [entry.task for entry in bundle.metadata.entries], evidence)


def routed_tasks(bundle: Bundle, log_prior: Tensor) -> list[str | None]:
    """The task that each of n requests is sent to, from `routing`'s log prior [n, B]; None without a gate."""
    if bundle.gate is None:
        return [None] * len(log_prior)
    return [bundle.metadata.entries[row].task for row in log_prior.argmax(dim=1).tolist()]


def fact_tasks(bundle: Bundle, evidence: Tensor) -> list[tuple[str, ...]]:
    """The tasks of the gate whose facts count for each of n requests with evidence [n, H]."""
    if bundle.gate is None:
        return [()] * len(evidence)
    return [decision.fact_tasks for decision in decisions(bundle.gate, evidence)]
