"""Choose some of a task's examples at random: its anchors, and those that are held out for validation."""

from collections.abc import Sequence

import numpy as np

from inducekv_vllm.errors import TaskDataError

from .examples import Example

VALIDATION_SHARE = 0.1  # of a task's examples, held out if there are no others
ANCHORS_PER_TASK = 64


def choose_anchors(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """The examples of a task that become anchors (paper, "Anchor Protocol"): at most `count`, in their order."""
    return [examples[row] for row in some_rows(len(examples), count, (seed, 1))]


def some_rows(N: int, count: int, seed: tuple[int, ...]) -> list[int]:
    """`count` of N rows, uniformly without replacement, rising; all if there are no more."""
    if count >= N:
        return list(range(N))
    return sorted(np.random.default_rng(seed).choice(N, count, replace=False).tolist())


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
