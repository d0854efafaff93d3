"""Choose a subset of examples: at random, spread out (k-center), stratified by answer, or the hardest.

Shapes: N examples, d hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from inducekv_vllm.errors import TaskDataError

from .examples import Example

VALIDATION_SHARE = 0.1  # of a task's examples, held out if there are no others
ANCHORS_PER_TASK = 64
Policy = Literal["random", "k-center"]
AnchorPolicy = Literal["random", "stratified", "k-center", "hard"]


def choose_anchors(
    examples: Sequence[Example],
    count: int,
    policy: AnchorPolicy,
    seed: int,
    *,
    keys: Tensor,
    losses: Sequence[float] = (),
) -> list[int]:
    """Which examples of a task become anchors (paper, "Anchor Protocol"): at most `count` rows, increasing.

    Args:
        policy: "random": uniformly without replacement. "stratified": one example of each answer in turn. "k-center":
            farthest-first over the retrieval keys. "hard": the highest losses.
        keys: [N, d], unit norm.
        losses: [N], of the frozen model without memory; needed for "hard" only.
    """
    if count >= len(examples):
        return list(range(len(examples)))
    rng = np.random.default_rng((seed, 1))
    if policy in ("random", "k-center"):
        return pick(len(examples), count, policy, rng, keys)
    if policy == "hard":
        assert len(losses) == len(examples)
        return sorted(np.argsort(-np.asarray(losses), kind="stable")[:count].tolist())
    by_answer: dict[str, list[int]] = defaultdict(list)
    for row in rng.permutation(len(examples)).tolist():
        by_answer[examples[row].answer].append(row)
    queues = [by_answer[answer] for answer in sorted(by_answer)]
    depth = max(map(len, queues))
    in_turn = [queue[at] for at in range(depth) for queue in queues if at < len(queue)]
    return sorted(in_turn[:count])


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


def hold_out(examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """The examples without a tenth of their questions, and that tenth, which the seed chooses, for validation.

    Examples that ask the same question are on the same side. Raises TaskDataError: all of them do.
    """
    asked: dict[str, int] = {}  # the number of each question
    questions = [asked.setdefault(example.source_digest, len(asked)) for example in examples]
    if len(asked) < 2:
        raise TaskDataError(
            f"a tenth of the questions is held out for validation, and all {len(examples)} examples ask the same one: "
            "give other questions, or validation data"
        )
    count = max(1, round(VALIDATION_SHARE * len(asked)))
    chosen = set(np.random.default_rng((seed, 5)).choice(len(asked), count, replace=False).tolist())
    sides = [question in chosen for question in questions]
    kept = [example for example, is_held_out in zip(examples, sides, strict=True) if not is_held_out]
    return kept, [example for example, is_held_out in zip(examples, sides, strict=True) if is_held_out]
