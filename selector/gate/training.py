"""Trains a gate's prototypes, weights and thresholds.

A question's log-odds of a task against none are linear in its evidence (see `inducekv_vllm.gate.evidence`). Prototypes,
floors and weights are trained by the cross-entropy over the C tasks and none: once for the tokens, and once for their
means. The log-odds of a question are the weighted mean of the two. Trained together, the tokens would leave nothing to
learn, as they tell the training's own words without error; the means are there for words that nobody has seen.
Thresholds are set on questions that the training has not seen.

Shapes: C tasks, S layers, P prototypes of a layer, H = S P, F features of a token, n questions, t deciding tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, softplus

from inducekv_vllm.backbone.footprint import prototypes_of
from inducekv_vllm.gate import above_floors

LEARNING_RATE: Final = 1e-2
EPOCHS: Final = 12
BATCH: Final = 64
TOKENS_SHARE: Final = 1 / 3  # of the log-odds, the means have the rest
DROPPED: Final = 0.1  # of the tokens, in training: a question has more than one sign of its task
FIRST_FLOOR: Final = 0.2
FLOORS: Final = (0.05, 0.9)
SHARPNESS: Final = 10.0  # scales the log-odds, so that weights of about 1 can decide
LEAST_ODDS: Final = 0.0  # a gate never opens where a task is less likely than none, whatever it misses
LEAST_THRESHOLD: Final = 1e-2
MISSES: Final = (0.0, 0.01, 0.02, 0.05, 0.1)  # of the table that is printed
NEAR: Final = 0.97  # of what belongs to no task is less like a task than a question whose facts count


@dataclass(frozen=True)
class TrainedGate:
    """See `inducekv_vllm.gate`: what a bundle stores."""

    center: Tensor  # [S, F] float32
    scale: Tensor  # [S, F] float32
    prototypes: Tensor  # [S, P, F] float32, norm 1
    floors: Tensor  # [S, P] float32
    weights: Tensor  # [C, H] float32
    thresholds: Tensor  # [C] float32
    near: tuple[float, ...]  # [C]
    prices: tuple[Price, ...]


@dataclass(frozen=True)
class Price:
    """What a share of missed questions costs, on held-out questions."""

    misses: float  # of own questions, allowed
    opened: dict[str, float]  # the share of each kind of other questions that opens the gate


class _Scores(nn.Module):
    """The gate while it is trained."""

    def __init__(self, tokens: Tensor, num_tasks: int, dropped: float) -> None:
        """`tokens` [n, S, F], standardised, of norm 1."""
        super().__init__()
        self.dropped = dropped
        chosen = torch.randperm(len(tokens))[: prototypes_of(num_tasks)]
        self.directions = nn.Parameter(tokens[chosen].transpose(0, 1).clone())  # [S, P, F]
        layers, count = self.directions.shape[:2]
        self.floor = nn.Parameter(torch.full((layers, count), FIRST_FLOOR))
        self.weights = nn.Parameter(torch.randn(num_tasks, layers * count) * 0.1)
        self.threshold = nn.Parameter(torch.full((num_tasks,), -1.0))

    @property
    def floors(self) -> Tensor:
        return self.floor.clamp(*FLOORS)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Log-odds [n, C] of each task against none, from tokens [n, t, S, F] and which of them count, bool [n, t]."""
        cosines = torch.einsum("ntsf,spf->ntsp", tokens, normalize(self.directions, dim=2))
        if self.training:
            counts = counts & (torch.rand(counts.shape) >= self.dropped)
        found = above_floors(cosines.masked_fill(~counts[:, :, None, None], -1), self.floors)  # [n, S, P]
        return SHARPNESS * found.flatten(1) @ self.weights.T - softplus(self.threshold)


def train_gate(
    values: Sequence[Tensor],
    labels: Sequence[int],
    held_out: Sequence[bool],
    kinds: Sequence[str],
    num_tasks: int,
    *,
    misses: float,
    seed: int,
) -> TrainedGate:
    """A gate for C tasks.

    Args:
        values: [t, S, F] of each of n questions, the last layer averaged.
        labels: [n], the task's number; C for none.
        held_out: [n], whether it sets thresholds and is not trained on.
        kinds: [n], of questions of no task.
        misses: share of the tasks' held-out questions that the gate may miss.
    """
    target = torch.tensor(labels)
    fitted = [row for row, out in enumerate(held_out) if not out]
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        parts = [
            _train_part(features, target, fitted, num_tasks, dropped, seed) for features, dropped in _parts_of(values)
        ]
    finally:
        torch.random.set_rng_state(generator_state)
    weights, thresholds, near, prices = _together(
        [part.odds for part in parts], target, torch.tensor(held_out), kinds, misses
    )
    return TrainedGate(
        center=torch.cat([part.center for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        prototypes=torch.cat([part.prototypes for part in parts]),
        floors=torch.cat([part.floors for part in parts]),
        weights=weights,
        thresholds=thresholds,
        near=near,
        prices=prices,
    )


@dataclass(frozen=True)
class _Odds:
    """The log-odds of every question, by a part of the evidence."""

    weights: Tensor  # [C, of the part's evidence]
    offsets: Tensor  # [C]
    margins: Tensor  # [n, C]: weighted evidence less offsets


@dataclass(frozen=True)
class _Part:
    """A gate on some of the layers, as `TrainedGate` has it."""

    center: Tensor
    scale: Tensor
    prototypes: Tensor
    floors: Tensor
    odds: _Odds


def _parts_of(values: Sequence[Tensor]) -> list[tuple[list[Tensor], float]]:
    """The tokens [t, S - 1, F] of all layers but the last, if there are any, and the means [u, 1, F] in the last.

    With each, the share of tokens that are left out in training.
    """
    # A prompt's last mean is repeated, so that there is one a token.
    means = [torch.unique_consecutive(v[:, -1:], dim=0).float() for v in values]
    if values[0].shape[1] == 1:
        return [(means, 0.0)]
    return [([v[:, :-1].float() for v in values], DROPPED), (means, 0.0)]


def _together(
    parts: Sequence[_Odds], labels: Tensor, held_out: Tensor, kinds: Sequence[str], misses: float
) -> tuple[Tensor, Tensor, tuple[float, ...], tuple[Price, ...]]:
    """Weights [C, H], thresholds [C], `near` [C] and prices of the parts' weighted mean.

    The parts are tokens and means, or the means alone.
    """
    shares = [1.0] if len(parts) == 1 else [TOKENS_SHARE, 1 - TOKENS_SHARE]

    def weighted(of_parts: Sequence[Tensor]) -> list[Tensor]:
        return [share * of_part for share, of_part in zip(shares, of_parts, strict=True)]

    margins = torch.stack(weighted([part.margins for part in parts])).sum(dim=0)
    offsets = torch.stack(weighted([part.offsets for part in parts])).sum(dim=0)
    weights = torch.cat(weighted([part.weights for part in parts]), dim=1)
    return weights.float(), *_priced(margins, offsets, labels, held_out, kinds, misses)


def _train_part(
    features: Sequence[Tensor], labels: Tensor, fitted: Sequence[int], num_tasks: int, dropped: float, seed: int
) -> _Part:
    joined = torch.cat([features[row] for row in fitted])
    center, scale = joined.mean(dim=0), 1 / joined.std(dim=0).clamp(min=1e-6)
    tokens = [normalize((of_question - center) * scale, dim=2) for of_question in features]
    scores = _train(tokens, labels, fitted, num_tasks, dropped, seed).eval()
    with torch.no_grad():
        return _Part(
            center=center,
            scale=scale,
            prototypes=normalize(scores.directions, dim=2),
            floors=scores.floors,
            odds=_Odds(SHARPNESS * scores.weights, softplus(scores.threshold), _all_scores(scores, tokens)),
        )


def _priced(
    margins: Tensor, offsets: Tensor, labels: Tensor, held_out: Tensor, kinds: Sequence[str], misses: float
) -> tuple[Tensor, tuple[float, ...], tuple[Price, ...]]:
    """Thresholds [C], `near` [C] and prices.

    Args:
        margins: [n, C], log-odds without a threshold.
        offsets: [C], what they have subtracted.
    """
    num_tasks = margins.shape[1]

    def threshold_of(allowed: float) -> Tensor:
        return _threshold(margins, labels, held_out, num_tasks, allowed)

    threshold = threshold_of(misses)
    prices = tuple(
        price_of(margins, labels, held_out, kinds, offsets, threshold_of(allowed), allowed)
        for allowed in sorted({*MISSES, misses})
    )
    thresholds = (offsets + threshold).clamp(min=LEAST_THRESHOLD)  # [C]
    near = near_of((margins + offsets - thresholds)[held_out], labels[held_out])
    return thresholds.float(), near, prices


def _train(
    tokens: Sequence[Tensor], labels: Tensor, rows: Sequence[int], num_tasks: int, dropped: float, seed: int
) -> _Scores:
    scores = _Scores(torch.cat([tokens[row] for row in rows]), num_tasks, dropped)
    rng = np.random.default_rng(seed)
    steps = EPOCHS * -(-len(rows) // BATCH)
    optimizer = torch.optim.AdamW(scores.parameters(), lr=LEARNING_RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1)
    for _ in range(EPOCHS):
        for batch in _batches(tokens, rows, rng):
            odds = scores(*_padded([tokens[row] for row in batch]))  # [n, C]
            none = torch.zeros(len(batch), 1)
            loss = cross_entropy(torch.cat([odds, none], dim=1), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return scores


def _threshold(margins: Tensor, labels: Tensor, held_out: Tensor, num_tasks: int, misses: float) -> Tensor:
    """[]: the log-odds that all but a share of the tasks' held-out questions reach.

    One for all tasks, so that log-odds alone choose between them.
    """
    own = held_out & (labels < num_tasks)
    reached = margins[own].gather(1, labels[own, None])[:, 0]  # [held-out questions]
    return reached.quantile(misses).clamp(min=LEAST_ODDS) if len(reached) else torch.zeros(())


def near_of(margins: Tensor, labels: Tensor) -> tuple[float, ...]:
    """[C]: what nearly all questions of no task stay below, in margins [n, C] of the whole rule; at most 0."""
    num_tasks = margins.shape[1]
    others = margins[labels == num_tasks]  # [questions of no task, C]
    if not len(others):
        return (0.0,) * num_tasks
    return tuple(others.quantile(NEAR, dim=0).clamp(max=0).tolist())


def price_of(
    margins: Tensor,
    labels: Tensor,
    held_out: Tensor,
    kinds: Sequence[str],
    offsets: Tensor,
    threshold: Tensor,
    misses: float,
) -> Price:
    num_tasks = margins.shape[1]
    opened = (margins >= threshold.maximum(LEAST_THRESHOLD - offsets)).any(dim=1)  # [n]
    shares = {}
    for kind in dict.fromkeys(kinds):
        rows = torch.tensor([k == kind for k in kinds]) & held_out & (labels == num_tasks)
        if rows.any():
            shares[kind] = float(opened[rows].float().mean())
    return Price(misses, shares)


def _all_scores(scores: _Scores, tokens: Sequence[Tensor]) -> Tensor:
    found = torch.zeros(len(tokens), len(scores.threshold))
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
    for first in range(0, len(order), BATCH):
        batch = order[first : first + BATCH]
        found[batch] = scores(*_padded([tokens[row] for row in batch]))
    return found


def _batches(tokens: Sequence[Tensor], rows: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Questions of about one length together, in any order."""
    noise = rng.random(len(rows))
    order = sorted(range(len(rows)), key=lambda at: (len(tokens[rows[at]]) // 8, noise[at]))
    batches = [[rows[at] for at in order[first : first + BATCH]] for first in range(0, len(order), BATCH)]
    return [batches[at] for at in rng.permutation(len(batches))]


def _padded(tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[n, longest t, F], and which tokens count, bool [n, longest t]."""
    lengths = torch.tensor([len(of_question) for of_question in tokens])
    stacked = nn.utils.rnn.pad_sequence(list(tokens), batch_first=True)
    return stacked, torch.arange(stacked.shape[1])[None] < lengths[:, None]
