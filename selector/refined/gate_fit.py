"""Fit the relevance gate: which questions a memory answers, told from query keys alone.

Every task gets one direction and one threshold (`inducekv_vllm.gate` has the rule). They are a linear discriminant
analysis whose classes are the tasks and everything else, with one covariance within all classes: a margin is the
log-odds of a task against everything else, less what it must reach. Over both parts of the key: the text part tells
tasks apart by what is asked, the prefix part those that ask the same of different pictures.

What must be reached comes from examples that were held out of the fit (cross-validation): directions fitted to few
examples in many dimensions lie about these.

Letters: C tasks, G classes, n query keys, d hidden size, p the parts of a key: 2, or 1 for the prefix alone.
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
MISSED: Final = 0.02  # of a task's own held-out questions, which the gate may leave outside
INTRUDED: Final = 0.01  # of the other held-out questions, which it may let in where that misses no more


def fit_gate(own: Mapping[str, Tensor], base: Tensor, *, prefix_only: bool = False) -> Gate:
    """A gate that tells C tasks from each other and from everything else.

    Args:
        own: query keys [n, 2, d] of questions of each task, in the order of the stream.
        base: query keys [n, 2, d] of questions that no memory is needed for; may be empty: then the gate only knows
            what the tasks' own questions look like, and tells them from each other.
        prefix_only: by the prefix part of the keys alone; the text part of the gate's keys is 0.

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
    """Where nothing else is known: the mean of one task's last key part, [1, p, d], and a threshold, [1]."""
    key = own.double().mean(dim=0)  # [p, d]
    key[:-1] = 0  # where the text is known, it is alike
    key = key / key.norm()
    return key[None], torch.einsum("npd,pd->n", own.double(), key.half().double()).quantile(MISSED)[None]


def _fit(tasks: Sequence[Tensor], base: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [C, p, d] and thresholds [C] for groups of query keys [n, p, d]."""
    groups = [*tasks, base] if len(base) else [*tasks]
    held_out = _held_out_margins(groups, len(tasks))  # [n, C] of each class
    keys, offsets = discriminants(groups, len(tasks))
    scale = 1 / keys.flatten(1).norm(dim=1).amax().clamp(min=torch.finfo(torch.float64).tiny)
    return keys * scale, (offsets + _required(held_out, len(tasks))) * scale


def _required(held_out: Sequence[Tensor], num_tasks: int) -> Tensor:
    """What each task's log-odds must reach, [C], by those of held-out examples, [n, C] of each class.

    One number for all tasks where that can be had, so that against each other they are weighed by their log-odds alone:
    half-way between what the tasks reach and what everything else does, or, where nothing else is known, what every
    one of their questions reaches. Where the two overlap, the tasks' own questions come first.
    """
    own = [held_out[c][:, c] for c in range(num_tasks)]  # [n] each
    if len(held_out) == num_tasks:
        return torch.cat(own).min().expand(num_tasks)
    low = torch.stack([margins.quantile(MISSED) for margins in own])  # [C]
    high = held_out[-1].amax(dim=1).quantile(1 - INTRUDED)
    return torch.where(high < low.min(), (high + low.min()) / 2, torch.minimum(low, high))


def _held_out_margins(groups: Sequence[Tensor], num_tasks: int) -> list[Tensor]:
    """The log-odds [n, C] of every class's examples, from a fit to the folds that they are not in."""
    found: list[list[Tensor]] = [[] for _ in groups]
    for fold in range(FOLDS):
        keys, offsets = discriminants([_part(group, fold, False) for group in groups], num_tasks)
        for margins, group in zip(found, groups, strict=True):
            margins.append(torch.einsum("npd,cpd->nc", _part(group, fold, True).double(), keys) - offsets)
    return [torch.cat(margins) for margins in found]


def discriminants(groups: Sequence[Tensor], num_tasks: int) -> tuple[Tensor, Tensor]:
    """Log-odds of the first classes against a reference, as <q, key> - offset: keys [C, p, d], offsets [C]; float64.

    With mu_g the mean of class g, S the covariance within the classes, s its shrinkage, and the reference r the last
    class's mean, or, where all classes are tasks, the mean of their means:

        key_c = (S + s I)^-1 (mu_c - r)        offset_c = <key_c, (mu_c + r) / 2>

    Solved in the space of the n samples where they are fewer than the p d dimensions (the same solution, by the
    push-through identity).

    Args:
        groups: query keys [n, p, d] of each of the G classes, the tasks first; then everything else, if anything.
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
