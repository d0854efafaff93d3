"""A gate of two classifiers: its rule, its threshold, what other thresholds would cost, and whether it is of use.

Shapes: C tasks, n questions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from inducekv_vllm.bundle import Gate
from inducekv_vllm.gate import RANGE, TurnMarks

from .classifiers import WORDS_SHARE, Classifiers, Seen, left_out_odds, train_classifiers
from .fitting_set import GateQuestion
from .settings import TEXT_MISSES
from .training import MISSES, Price, near_of, price_of

LEAST_COUNT, MOST_COUNT = 64, 256  # questions that a task counts as
SEEN_RIGHT: Final = 0.8  # of a task's questions that were left out go to it, or the gate is said to be of no use
OTHERS: Final = 0.05  # of everyday requests open it, at most
USUAL_MISSES: Final = (TEXT_MISSES, 0.1, 0.15, 0.2)  # the first with which no more than `USUAL_OTHERS` open it
USUAL_OTHERS: Final = 0.02  # of everyday requests
MIXED_UP: Final = 0.2  # of a task's questions are taken for another's, at most


@dataclass(frozen=True)
class LooksAt:
    """What of a prompt the gate is shown."""

    layers: tuple[int, ...]  # [S]
    marks: TurnMarks
    clause_ends: Tensor  # [E] int32, tokens


def classified_gate(
    seen: Seen,
    questions: Sequence[GateQuestion],
    labels: Tensor,
    tasks: tuple[str, ...],
    looks_at: LooksAt,
    misses: float | None,
) -> tuple[Gate, tuple[Price, ...], tuple[str, ...], float]:
    """The gate, its prices, what is wrong with it, and the share of questions that it may miss.

    Args:
        labels: [n] int64, the task's number; C for none.
        misses: share of the tasks' questions, as they stand, that the gate may miss of those that it was not fitted to;
            None for the least of `USUAL_MISSES` that keeps everyday requests out.
    """
    C, counts = len(tasks), counts_of(questions)
    trained = train_classifiers(seen, labels, counts, C)
    folds = torch.tensor([question.fold for question in questions])  # [n]
    left_out = mixed(left_out_odds(seen, labels, counts, folds, C))  # [n, C]
    kinds = [question.kind for question in questions]
    share = _share_of_misses(left_out, labels, kinds, misses)
    chosen = threshold(left_out, as_they_stand(labels, kinds, C), share)
    margins = left_out - chosen  # [n, C]
    gate = gate_of(trained, chosen, near_of(margins, labels), tasks, looks_at)
    return gate, _prices(left_out, labels, kinds, share), _problems(margins, labels, kinds, tasks), share


def _share_of_misses(odds: Tensor, labels: Tensor, kinds: Sequence[str], misses: float | None) -> float:
    """As asked, or the least of some that keeps everyday requests out; the largest of them if none does."""
    if misses is not None:
        return misses
    own, everyday = as_they_stand(labels, kinds, odds.shape[1]), odds[[kind == "everyday" for kind in kinds]]
    for share in USUAL_MISSES:
        if float((everyday.amax(dim=1) >= threshold(odds, own, share)).float().sum()) <= USUAL_OTHERS * len(everyday):
            return share
    return USUAL_MISSES[-1]


def _prices(odds: Tensor, labels: Tensor, kinds: Sequence[str], misses: float) -> tuple[Price, ...]:
    """Of log-odds [n, C] by classifiers that have not seen the question."""
    C, every = odds.shape[1], torch.ones(len(labels), dtype=torch.bool)

    def price(allowed: float) -> Price:
        reached = threshold(odds, as_they_stand(labels, kinds, C), allowed)
        return price_of(odds, labels, every, kinds, torch.full((C,), RANGE), reached, allowed)

    return tuple(price(allowed) for allowed in sorted({*MISSES, misses}))


def mixed(odds: Tensor) -> Tensor:
    """Log-odds [n, C] of both classifiers, from those of means and of words [n, 2, C]."""
    return (1 - WORDS_SHARE) * odds[:, 0] + WORDS_SHARE * odds[:, 1]


def as_they_stand(labels: Tensor, kinds: Sequence[str], num_tasks: int) -> Tensor:
    """[n]: the labels of the tasks' questions that are not varied; -1 for every other."""
    plain = torch.tensor([kind == "plain" for kind in kinds])
    return labels.where(plain & (labels < num_tasks), -1)


def threshold(odds: Tensor, own: Tensor, misses: float) -> Tensor:
    """[]: what all but a share of the tasks' questions reach, in log-odds [n, C] that they were left out for.

    The conformal quantile: a new question of the same kind stays below it with that chance, however they are
    distributed.

    Args:
        own: [n] int64, the task's number; -1 for a question that does not count.
    """
    counted = own >= 0
    reached = odds[counted].gather(1, own[counted, None])[:, 0].sort().values
    place = max(int(misses * (len(reached) + 1)) - 1, 0)
    return reached[place].clamp(-RANGE + 1, RANGE - 1)


def gate_of(
    trained: Classifiers,
    chosen: Tensor,
    near: tuple[float, ...],
    tasks: tuple[str, ...],
    looks_at: LooksAt,
) -> Gate:
    """As a bundle stores it. Evidence is log-odds from 0 to 1, and its weights make log-odds of it again."""
    C, S, features = len(tasks), *trained.center.shape
    identity = 2 * RANGE * torch.eye(C)
    return Gate(
        layers=looks_at.layers,
        marks=looks_at.marks,
        center=trained.center,
        scale=trained.scale,
        prototypes=torch.zeros(S, 0, features, dtype=torch.float16),
        floors=torch.zeros(S, 0),
        weights=torch.cat([(1 - WORDS_SHARE) * identity, WORDS_SHARE * identity], dim=1),
        thresholds=torch.full((C,), RANGE + float(chosen)),
        tasks=tasks,
        near=near,
        directions=trained.directions,
        rarity=trained.rarity,
        words=trained.words.half(),
        offsets=torch.stack([trained.mean_offsets, trained.word_offsets]),
        clause_ends=looks_at.clause_ends,
    )


def counts_of(questions: Sequence[GateQuestion]) -> Tensor:
    """[n]: as how many each counts. What is of no task counts once; a task counts as its questions, within limits."""
    asked = Counter(question.task for question in questions)
    return torch.tensor(
        [
            1.0
            if question.task is None
            else min(max(asked[question.task], LEAST_COUNT), MOST_COUNT) / asked[question.task]
            for question in questions
        ]
    )


def _problems(margins: Tensor, labels: Tensor, kinds: Sequence[str], tasks: Sequence[str]) -> tuple[str, ...]:
    """What the questions show that were left out, as they stand."""
    plain = torch.tensor([kind == "plain" for kind in kinds])
    best, is_open = margins.argmax(dim=1), margins.amax(dim=1) >= 0
    problems = []
    for number, task in enumerate(tasks):
        own = plain & (labels == number)
        routed = float((is_open & (best == number))[own].float().mean())
        if routed < SEEN_RIGHT:
            problems.append(f"the gate sends {routed:.0%} of the questions of {task!r} to it that it has not seen")
        for other, name in enumerate(tasks):
            taken = float((best == other)[own].float().mean())
            if other != number and taken > MIXED_UP:
                problems.append(f"the tasks {task!r} and {name!r} are too near: {taken:.0%} are taken for the other's")
    everyday = torch.tensor([kind == "everyday" for kind in kinds])
    opened = float(is_open[everyday].float().mean()) if everyday.any() else 0.0
    if opened > OTHERS:
        problems.append(f"{opened:.0%} of everyday requests open the gate: it needs more questions, or --gate-misses")
    return tuple(problems)
