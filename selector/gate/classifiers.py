"""Two linear classifiers that tell the questions of C tasks from each other and from everything else.

One sees a question's words, the other the mean of its tokens' values in some layers, whitened by what the everyday
requests of the package are like. They err on different questions, so a question's log-odds are the weighted mean of
theirs. Both see all of a question and every run of a few clauses; of the log-odds the largest count. So they learn from
what the questions of tasks say as a whole, and from all runs of the others.

What sets the threshold, the prices and the shares that are told comes from questions that neither has seen: each of
`FOLDS` parts of the examples is left out once.

Shapes: C tasks, S layers, F features of a token, N buckets of words, n questions, R runs of one, m runs of all.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding_bag, pad

from inducekv_vllm.gate.odds import of_best_run
from inducekv_vllm.gate.words import BUCKETS, Buckets, Numbers, run_counts, weighted

WORDS_SHARE: Final = 0.6  # of the log-odds, the means have the rest
WORDS_PENALTY, MEANS_PENALTY = 1 / 200, 1 / (2 * 0.03)  # of squared weights, beside the sum of all losses
FLATTEST: Final = 0.1  # added to the variance of a direction, of which 1 is usual
STEPS: Final = 100  # of L-BFGS, at most


@dataclass(frozen=True)
class Seen:
    """What the classifiers see of n questions: of each, all of it, and then its runs."""

    means: Sequence[Tensor]  # [R, S, F] float32
    words: Sequence[tuple[Buckets, Numbers]]  # [U] and [R, U], see `inducekv_vllm.gate.words.run_counts`

    @classmethod
    def of(cls, means: Sequence[Tensor], texts: Sequence[str]) -> Seen:
        return cls(means, [run_counts(text) for text in texts])

    def take(self, rows: Sequence[int]) -> Seen:
        return Seen([self.means[row] for row in rows], [self.words[row] for row in rows])


@dataclass(frozen=True)
class Classifiers:
    """See `inducekv_vllm.gate`: what a bundle stores."""

    center: Tensor  # [S, F]
    scale: Tensor  # [S, F]
    directions: Tensor  # [C, S, F]
    mean_offsets: Tensor  # [C]
    rarity: Tensor  # [N]
    words: Tensor  # [C, N]
    word_offsets: Tensor  # [C]


def train_classifiers(seen: Seen, labels: Tensor, counts: Tensor, num_tasks: int) -> Classifiers:
    """
    Args:
        labels: [n] int64, the task's number; C for none.
        counts: [n], as how many questions each counts.
    """
    outside = labels == num_tasks
    of_means, means = _Runs.of(seen.means), torch.cat(list(seen.means))  # [m, S, F]
    center, scale, turned = _whitening(means[of_means.first][outside])
    whitened = torch.einsum("nsf,sfg->nsg", (means - center) * scale, turned)  # [m, S, F]
    weights, mean_offsets = _fitted(
        _Dense(whitened.flatten(1)), *of_means.taught(labels, counts, outside), num_tasks, MEANS_PENALTY
    )
    directions = torch.einsum("sfg,csg->csf", turned, weights.view(num_tasks, *center.shape))
    rarity = _rarity([buckets for buckets, _ in seen.words])
    word_weights, word_offsets = _fitted(
        _bags(seen.words, rarity), *_of_words(seen).taught(labels, counts, outside), num_tasks, WORDS_PENALTY
    )
    return Classifiers(center, scale, directions, mean_offsets, rarity, word_weights, word_offsets)


def left_out_odds(seen: Seen, labels: Tensor, counts: Tensor, folds: Tensor, num_tasks: int) -> Tensor:
    """Log-odds [n, 2, C] by means and by words, each question's by classifiers that have not seen its fold [n]."""
    odds = torch.zeros(len(labels), 2, num_tasks)
    for fold in sorted(set(folds.tolist())):
        rest, own = (folds != fold).nonzero()[:, 0], (folds == fold).nonzero()[:, 0]
        trained = train_classifiers(seen.take(rest.tolist()), labels[rest], counts[rest], num_tasks)
        odds[own] = odds_of(trained, seen.take(own.tolist()))
    return odds


def odds_of(trained: Classifiers, seen: Seen) -> Tensor:
    """Log-odds [n, 2, C], by means and by words: those of the run that has most."""
    standard = (torch.cat(list(seen.means)) - trained.center) * trained.scale  # [m, S, F]
    by_means = torch.einsum("nsf,csf->nc", standard, trained.directions) + trained.mean_offsets  # [m, C]
    by_words = _bags(seen.words, trained.rarity).times(trained.words) + trained.word_offsets
    return torch.stack([_Runs.of(seen.means).largest(by_means), _of_words(seen).largest(by_words)], dim=1)


@dataclass(frozen=True)
class _Runs:
    """Which of m runs, one question's after the other's, are whose."""

    question: Tensor  # [m] int64
    sizes: Tensor  # [n] int64

    @classmethod
    def of(cls, questions: Sequence[Sized]) -> _Runs:
        sizes = torch.tensor([len(runs) for runs in questions])
        return cls(torch.arange(len(sizes)).repeat_interleave(sizes), sizes)

    @property
    def first(self) -> Tensor:
        """[n]: the places of the runs that are all of a question."""
        return self.sizes.cumsum(0) - self.sizes

    def largest(self, odds: Tensor) -> Tensor:
        """[n, C], from log-odds [m, C]."""
        return torch.stack([of_best_run(of_question) for of_question in torch.split(odds, self.sizes.tolist())])

    def taught(self, labels: Tensor, counts: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
        """Labels [m] of runs, and as how many questions each counts [m], from those of questions [n].

        What a question of a task says in a part of it may be no question of that task.
        """
        parts = counts * outside / (self.sizes - 1).clamp(min=1).sqrt()  # [n]
        of_runs = parts[self.question]
        of_runs[self.first] = counts
        return labels[self.question], of_runs


def _whitening(outside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What makes features [n, S, F] of requests alike: center and scale [S, F], and a turn [S, F, F]."""
    center, scale = outside.mean(dim=0), 1 / outside.std(dim=0).clamp(min=1e-6)
    standard = ((outside - center) * scale).transpose(0, 1)  # [S, n, F]
    values, vectors = torch.linalg.eigh(standard.transpose(1, 2) @ standard / len(outside))  # [S, F], [S, F, F]
    return center, scale, vectors / (values.clamp(min=0) + FLATTEST).sqrt()[:, None]


@dataclass(frozen=True)
class _Dense:
    features: Tensor  # [n, D]

    @property
    def width(self) -> int:
        return self.features.shape[1]

    def times(self, weights: Tensor) -> Tensor:
        """[n, C], from weights [C, D]."""
        return self.features @ weights.T


@dataclass(frozen=True)
class _Bags:
    """The buckets of n runs, one after the other."""

    buckets: Tensor  # int64
    amounts: Tensor
    starts: Tensor  # [n] int64
    width: int = BUCKETS

    def times(self, weights: Tensor) -> Tensor:
        """[n, C], from weights [C, N]."""
        return embedding_bag(
            self.buckets, weights.T.contiguous(), self.starts, mode="sum", per_sample_weights=self.amounts
        )


def _rarity(questions: Sequence[Buckets]) -> Tensor:
    """How rare each bucket is [N] among questions that have these."""
    found = torch.zeros(BUCKETS)
    for buckets in questions:
        found[torch.from_numpy(buckets)] += 1
    return 1 + torch.log((1 + len(questions)) / (1 + found))


def _of_words(seen: Seen) -> _Runs:
    return _Runs.of([counts for _, counts in seen.words])


def _bags(words: Sequence[tuple[Buckets, Numbers]], rarity: Tensor) -> _Bags:
    """Of m runs."""
    buckets, amounts, sizes = list[Buckets](), list[Numbers](), [0]
    for own, counts in words:
        runs, places = counts.nonzero()
        buckets.append(own[places])
        amounts.append(weighted(counts, rarity.numpy()[own])[runs, places])
        sizes += np.bincount(runs, minlength=len(counts)).tolist()
    starts = torch.tensor(sizes[:-1]).cumsum(0)
    return _Bags(torch.from_numpy(np.concatenate(buckets)), torch.from_numpy(np.concatenate(amounts)), starts)


def _fitted(
    features: _Dense | _Bags, labels: Tensor, counts: Tensor, num_tasks: int, penalty: float
) -> tuple[Tensor, Tensor]:
    """Weights [C, D] and offsets [C] of log-odds against none; what counts 0 is not seen."""
    weights = torch.zeros(num_tasks, features.width, requires_grad=True)
    offsets = torch.zeros(num_tasks, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, offsets], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        odds = pad(features.times(weights) + offsets, (0, 1))  # [n, C + 1]
        loss = (counts * cross_entropy(odds, labels, reduction="none")).sum() + penalty * weights.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weights.detach(), offsets.detach()
