"""Two linear classifiers that tell the questions of C tasks from each other and from everything else.

One sees a question's words, the other the mean of its tokens' values in some layers, whitened by what the everyday
requests of the package are like. They err on different questions, so a question's log-odds are the weighted mean of
theirs. What sets the threshold, the prices and the shares that are told comes from questions that neither has seen:
each of `FOLDS` parts of the examples is left out once.

Shapes: C tasks, S layers, F features of a token, N buckets of words, n questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding_bag, pad

from inducekv_vllm.gate.words import BUCKETS, weighted, word_counts

WORDS_SHARE: Final = 0.6  # of the log-odds, the means have the rest
WORDS_PENALTY, MEANS_PENALTY = 1 / 200, 1 / (2 * 0.03)  # of squared weights, beside the sum of all losses
FLATTEST: Final = 0.1  # added to the variance of a direction, of which 1 is usual
STEPS: Final = 100  # of L-BFGS, at most


@dataclass(frozen=True)
class Seen:
    """What the classifiers see of n questions."""

    means: Tensor  # [n, S, F] float32
    texts: Sequence[str]  # n of them


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
    center, scale, turned = _whitening(seen.means[outside])
    whitened = torch.einsum("nsf,sfg->nsg", (seen.means - center) * scale, turned)  # [n, S, F]
    weights, mean_offsets = _fitted(_Dense(whitened.flatten(1)), labels, counts, num_tasks, MEANS_PENALTY)
    directions = torch.einsum("sfg,csg->csf", turned, weights.view(num_tasks, *center.shape))
    rarity, words = _words(seen.texts)
    word_weights, word_offsets = _fitted(words, labels, counts, num_tasks, WORDS_PENALTY)
    return Classifiers(center, scale, directions, mean_offsets, rarity, word_weights, word_offsets)


def left_out_odds(seen: Seen, labels: Tensor, counts: Tensor, folds: Tensor, num_tasks: int) -> Tensor:
    """Log-odds [n, 2, C] by means and by words, each question's by classifiers that have not seen its fold [n]."""
    odds = torch.zeros(len(labels), 2, num_tasks)
    for fold in sorted(set(folds.tolist())):
        rest, own = (folds != fold).nonzero()[:, 0], (folds == fold).nonzero()[:, 0]
        trained = train_classifiers(_some(seen, rest), labels[rest], counts[rest], num_tasks)
        odds[own] = odds_of(trained, _some(seen, own))
    return odds


def odds_of(trained: Classifiers, seen: Seen) -> Tensor:
    """Log-odds [n, 2, C], by means and by words."""
    standard = (seen.means - trained.center) * trained.scale  # [n, S, F]
    by_means = torch.einsum("nsf,csf->nc", standard, trained.directions) + trained.mean_offsets
    by_words = _bags(seen.texts, trained.rarity).times(trained.words) + trained.word_offsets
    return torch.stack([by_means, by_words], dim=1)


def _some(seen: Seen, rows: Tensor) -> Seen:
    return Seen(seen.means[rows], [seen.texts[row] for row in rows.tolist()])


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
    """The buckets of n questions, one after the other."""

    buckets: Tensor  # int64
    amounts: Tensor
    starts: Tensor  # [n] int64
    width: int = BUCKETS

    def times(self, weights: Tensor) -> Tensor:
        """[n, C], from weights [C, N]."""
        return embedding_bag(
            self.buckets, weights.T.contiguous(), self.starts, mode="sum", per_sample_weights=self.amounts
        )


def _words(texts: Sequence[str]) -> tuple[Tensor, _Bags]:
    """How rare each bucket is [N] among these texts, and their words."""
    found = torch.zeros(BUCKETS)
    for text in texts:
        found[torch.from_numpy(word_counts(text)[0])] += 1
    rarity = 1 + torch.log((1 + len(texts)) / (1 + found))
    return rarity, _bags(texts, rarity)


def _bags(texts: Sequence[str], rarity: Tensor) -> _Bags:
    counted = [word_counts(text) for text in texts]
    amounts = [weighted(counts, rarity.numpy()[buckets]) for buckets, counts in counted]
    starts = np.cumsum([0, *(len(buckets) for buckets, _ in counted)])[:-1]
    return _Bags(
        torch.from_numpy(np.concatenate([buckets for buckets, _ in counted])),
        torch.from_numpy(np.concatenate(amounts)),
        torch.from_numpy(starts),
    )


def _fitted(
    features: _Dense | _Bags, labels: Tensor, counts: Tensor, num_tasks: int, penalty: float
) -> tuple[Tensor, Tensor]:
    """Weights [C, D] and offsets [C] of log-odds against none."""
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
