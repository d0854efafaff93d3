"""Fit the relevance gate: which questions a memory answers, told from query keys alone.

Every task gets one direction and one threshold (`inducekv_vllm.relevance` has the rule). The direction is Fisher's
linear discriminant between the task's own query keys and all others that are known: anchors of the other tasks, and
questions that are none of the memory's business. Over both parts of the key: the text part tells tasks apart by what is
asked, the prefix part those that ask the same of different pictures.

Thresholds come from examples that were held out of the fit (cross-validation): a direction fitted to few examples in
many dimensions lies about these.

Letters: C tasks, n query keys, d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from inducekv_vllm.bundle import Gate
from inducekv_vllm.errors import ConfigError

SHRINKAGE: Final = 1e-2  # of the covariance towards a multiple of the identity
FOLDS: Final = 5
MISSED: Final = 0.02  # of a task's own held-out questions, which the threshold may leave outside
INTRUDED: Final = 0.01  # of the others, which it may let in
TOWARDS_OTHERS: Final = 0.15  # where both can be had: how far the threshold stands from the own towards the others


def fit_gate(own: Mapping[str, Tensor], base: Tensor, *, prefix_only: bool = False) -> Gate:
    """A gate that tells C tasks from each other and from everything else.

    Args:
        own: query keys [n, 2, d] of questions of each task, in the order of the stream.
        base: query keys [n, 2, d] of questions that no memory is needed for; may be empty, and then the gate of a
            memory of one task only knows what its own questions look like.
        prefix_only: by the prefix part of the keys alone; the text part of the gate's keys is 0.

    Returns:
        A `Gate` whose keys and thresholds are rounded as a bundle stores them.

    Raises:
        ConfigError: a task without questions.
    """
    if prefix_only:
        own, base = {task: mine[:, :1] for task, mine in own.items()}, base[:, :1]
    keys, thresholds = [], []
    for task, mine in own.items():
        if not len(mine):
            raise ConfigError(f"the gate needs questions of the task {task!r}, and there are none")
        others = [*(theirs for name, theirs in own.items() if name != task), base]
        key, threshold = _fit_task(mine, [group for group in others if len(group)])
        keys.append(key)
        thresholds.append(threshold)
    stacked = torch.stack(keys)  # [C, 2, d], or [C, 1, d] of the prefix part
    stacked = torch.nn.functional.pad(stacked, (0, 0, 0, 2 - stacked.shape[1]))
    return Gate(stacked.half(), torch.stack(thresholds).float(), tuple(own))


def _fit_task(own: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One task's direction [2, d] and threshold []."""
    if not others:
        key = own.double().mean(dim=0)  # [2, d], or [1, d] of the prefix part
        key[:-1] = 0  # where the text is known, it is alike
        key = key / key.norm()
        return key, _scores(own, key).quantile(MISSED)
    inside, outside = [], []
    for fold in range(FOLDS):
        key = discriminant(_part(own, fold, False), [_part(group, fold, False) for group in others])
        inside.append(_scores(_part(own, fold, True), key))
        outside += [_scores(_part(group, fold, True), key) for group in others]
    low, high = torch.cat(inside).quantile(MISSED), torch.cat(outside).quantile(1 - INTRUDED)
    # Where the two overlap, the task's own questions come first.
    return discriminant(own, others), low + TOWARDS_OTHERS * (high - low).clamp(max=0)


def discriminant(own: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Fisher's discriminant of `own` [n, 2, d] against all `others` together, of unit length: [2, d] float64.

    (C + s I)^-1 (mean of own - mean of others), with C the covariance within the two classes. Solved in the space of
    the n samples where they are fewer than the 2 d dimensions (the same solution, by the push-through identity).
    """
    one, other = own.double().flatten(1), torch.cat(list(others)).double().flatten(1)  # [n, 2 d]
    shift = one.mean(dim=0) - other.mean(dim=0)  # [2 d]
    centred = torch.cat([one - one.mean(dim=0), other - other.mean(dim=0)])  # [n, 2 d]
    n, dimensions = centred.shape
    spread = SHRINKAGE * centred.square().sum() / (n * dimensions)  # [], s
    if not spread > 0:  # one sample in each class
        key = shift
    elif n < dimensions:
        inner = centred @ centred.T + n * spread * torch.eye(n, dtype=torch.float64)  # [n, n]
        key = (shift - centred.T @ torch.linalg.solve(inner, centred @ shift)) / spread
    else:
        covariance = centred.T @ centred / n + spread * torch.eye(dimensions, dtype=torch.float64)
        key = torch.linalg.solve(covariance, shift)
    norm = key.norm().clamp(min=torch.finfo(torch.float64).tiny)
    unit: Tensor = key / norm
    return unit.view(own.shape[1:])


def _scores(queries: Tensor, key: Tensor) -> Tensor:
    """[n] float64, with the direction rounded as it will be stored."""
    return torch.einsum("npd,pd->n", queries.double(), key.half().double())


def _part(group: Tensor, fold: int, held_out: bool) -> Tensor:
    """The examples of a fold, or all others; a group of one example is in every part."""
    if len(group) == 1:
        return group
    inside = torch.arange(len(group)) % min(FOLDS, len(group)) == fold % min(FOLDS, len(group))
    return group[inside if held_out else ~inside]
