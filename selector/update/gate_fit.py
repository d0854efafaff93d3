"""Fit the relevance gate, which decides from query keys alone which questions use a memory.

Every task gets a direction and a threshold (see `inducekv_vllm.gate`) by linear discriminant analysis. The classes are
the tasks and everything else, with a shared covariance; a margin is a task's log-odds against everything else, minus a
threshold. The key has two parts: the text part separates tasks by their questions, the prefix part separates tasks that
ask the same question about different images.

Thresholds are set by cross-validation: in many dimensions, directions fitted to few examples overfit them.

Shapes: C tasks, G classes, n query keys, d hidden size, p the parts of a key: 2, or 1 for the prefix alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from inducekv_vllm.bundle import Gate
from inducekv_vllm.errors import ConfigError

SHRINKAGE: Final = 2e-2  # of the covariance towards a multiple of the identity
FOLDS: Final = 5
MISSED: Final = 0.05  # share of a task's own held-out questions that the gate may miss, to keep others out
MISSED_ALONE: Final = 0.02  # if nothing is known of other questions
INTRUDED: Final = 0.01  # share of other held-out questions that it may let in, if it misses no more for it


def fit_gate(own: Mapping[str, Tensor], base: Tensor, *, prefix_only: bool = False) -> Gate:
    """A gate that separates C tasks from each other and from everything else.

    Args:
        own: query keys [n, 2, d] of questions of each task, in the order of the stream.
        base: query keys [n, 2, d] of questions that need no memory. If it is empty, the gate only separates the tasks.
        prefix_only: use only the prefix part of the keys; the text part of the gate's keys is 0.

    Returns:
        A `Gate` whose keys and thresholds are rounded as a bundle stores them.

    Raises:
        ConfigError: a task without questions.
    """
    for task, mine in own.items():
        if not len(mine):
            raise ConfigError(f"the gate needs questions of the task {task!r}, and there are none")
    parts = 1 if prefix_only else 2
    tasks = [mine[:, :parts] for mine in own.values()]
    keys, thresholds = _one_class(tasks[0]) if len(tasks) == 1 and not len(base) else _fit(tasks, base[:, :parts])
    padded = torch.nn.functional.pad(keys, (0, 0, 0, 2 - parts))  # [C, 2, d]
    return Gate(padded.half(), thresholds.float(), tuple(own))


def _one_class(own: Tensor) -> tuple[Tensor, Tensor]:
    """For one task and nothing to separate it from: its mean key, last part only, [1, p, d], and a threshold, [1]."""
    key = own.double().mean(dim=0)  # [p, d]
    key[:-1] = 0  # a task's questions share their text; their prefixes differ
    key = key / key.norm()
    return key[None], torch.einsum("npd,pd->n", own.double(), key.half().double()).quantile(MISSED_ALONE)[None]


def _fit(tasks: Sequence[Tensor], base: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [C, p, d] and thresholds [C] for groups of query keys [n, p, d]."""
    groups = [*tasks, base] if len(base) else [*tasks]
    held_out = _held_out_margins(groups, len(tasks))  # [n, C] of each class
    keys, offsets = discriminants(groups, len(tasks))
    scale = 1 / keys.flatten(1).norm(dim=1).amax().clamp(min=torch.finfo(torch.float64).tiny)
    return keys * scale, (offsets + _required(held_out, len(tasks))) * scale


def _required(held_out: Sequence[Tensor], num_tasks: int) -> Tensor:
    """Each task's threshold [C], from the log-odds of held-out examples, [n, C] of each class.

    One threshold for all tasks if possible, so that log-odds alone choose between them: halfway between the tasks'
    log-odds and everything else's, or, without anything else, the lowest of the tasks'. If the two overlap, the tasks'
    own questions have precedence.
    """
    own = [held_out[c][:, c] for c in range(num_tasks)]  # [n] each
    if len(held_out) == num_tasks:
        return torch.cat(own).min().expand(num_tasks)
    low = torch.stack([margins.quantile(MISSED) for margins in own])  # [C]
    high = held_out[-1].amax(dim=1).quantile(1 - INTRUDED)
    return torch.where(high < low.min(), (high + low.min()) / 2, torch.minimum(low, high))


def _held_out_margins(groups: Sequence[Tensor], num_tasks: int) -> list[Tensor]:
    """The log-odds [n, C] of every class's examples, each from a fit to the other folds."""
    by_class: list[list[Tensor]] = [[] for _ in groups]
    for fold in range(FOLDS):
        keys, offsets = discriminants([_part(group, fold, False) for group in groups], num_tasks)
        for margins, group in zip(by_class, groups, strict=True):
            margins.append(torch.einsum("npd,cpd->nc", _part(group, fold, True).double(), keys) - offsets)
    return [torch.cat(margins) for margins in by_class]


def discriminants(groups: Sequence[Tensor], num_tasks: int) -> tuple[Tensor, Tensor]:
    """Log-odds of the first classes against a reference, as <q, key> - offset: keys [C, p, d], offsets [C]; float64.

    mu_g is the mean of class g, S the covariance within the classes, s its shrinkage. The reference r is the last
    class's mean or, if all classes are tasks, the mean of their means:

        key_c = (S + s I)^-1 (mu_c - r)        offset_c = <key_c, (mu_c + r) / 2>

    With fewer samples n than dimensions p d, the system is solved in the space of the samples, by the push-through
    identity.

    Args:
        groups: query keys [n, p, d] of each of the G classes: the tasks, then everything else, if there is any.
    """
    flat = [group.double().flatten(1) for group in groups]  # [n, p d] each
    means = torch.stack([group.mean(dim=0) for group in flat])  # [G, p d]
    centred = torch.cat([group - mean for group, mean in zip(flat, means, strict=True)])  # [n, p d]
    reference = means[num_tasks] if num_tasks < len(groups) else means.mean(dim=0)  # [p d]
    shifts = means[:num_tasks] - reference  # [C, p d]
    n, dimensions = centred.shape
    spread = SHRINKAGE * centred.square().sum() / (n * dimensions)  # [], s
    if not spread > 0:  # one sample in each class
        keys = shifts
    elif n < dimensions:
        inner = centred @ centred.T + n * spread * torch.eye(n, dtype=torch.float64)  # [n, n]
        keys = (shifts - torch.linalg.solve(inner, centred @ shifts.T).T @ centred) / spread
    else:
        covariance = centred.T @ centred / n + spread * torch.eye(dimensions, dtype=torch.float64)
        keys = torch.linalg.solve(covariance, shifts.T).T
    offsets = (keys * (means[:num_tasks] + reference)).sum(dim=1) / 2
    return keys.view(num_tasks, *groups[0].shape[1:]), offsets


def _part(group: Tensor, fold: int, held_out: bool) -> Tensor:
    """The examples of a fold, or all others; a group of one example is in every part."""
    if len(group) == 1:
        return group
    inside = torch.arange(len(group)) % min(FOLDS, len(group)) == fold % min(FOLDS, len(group))
    return group[inside if held_out else ~inside]
