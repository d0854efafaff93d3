"""Adapt-infinity's selection of training rows (Maharana et al., 2025), for LoRA with replay.

A task's rows are clustered by their hidden states. The budget is shared equally among clusters, and what a small one
leaves goes to the others. In each cluster that score decides whose histogram has most entropy, of log-perplexity,
EL2N and gradient norm before training. Rows are drawn equally from 50 equal bins of it, after 5% at either end are cut
off (coverage-centric selection). Anchors of earlier tasks are rehearsed, as in LoRA + replay.

Not part of it: the image-grounding score, which needs pictures, and the permanent pruning of a pool that grows; a
stream here keeps anchors alone. The published histogram's edges are those of scores before they are standardised;
here they are of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from benchmarks.research.continual.methods.lora import LoraReplay
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.suites import TaskData
from selector.backbone.extraction import extract_keys
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example

BINS, CUT = 50, 0.05
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AdaptInf(LoraReplay):
    """LoRA + replay on rows that Adapt-infinity selects."""

    kind: ClassVar[Kind] = "adapter"
    name: str = "adapt_inf"
    share: float = 0.5  # of a task's rows that are trained on
    clusters: int = 10

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        keys = extract_keys(backbone, task.train, batch_size=64).double().numpy()  # [n, d]
        scores = scores_of(Scorer(backbone), task.train)
        count = max(1, round(self.share * len(task.train)))
        rows = selected(keys, scores, count, self.clusters, np.random.default_rng((context.seed, context.number)))
        chosen = replace(task, train=tuple(task.train[row] for row in rows))
        learnt = super().learn(chosen, previous, out, context)
        return replace(learnt, report=learnt.report | {"rows_selected": len(rows), "rows": len(task.train)})


@torch.no_grad()
def scores_of(scorer: Scorer, examples: Sequence[Example]) -> dict[str, Floats]:
    """By name, [n]: log-perplexity, EL2N and the norm of the loss's gradient with respect to the last hidden states.

    The last is |W' (p - y)|, W the output layer: the gradient that everything below is multiplied with.
    """
    head: Tensor = scorer.backbone.model.get_output_embeddings().weight  # [vocabulary, d]
    found: dict[str, list[float]] = {"log_perplexity": [], "el2n": [], "gradient_norm": []}
    for example in examples:
        (predicted,) = scorer.predicted([example])  # [answer tokens, vocabulary]
        tokens = torch.tensor(scorer.answer_tokens(example), device=predicted.device)
        error = predicted.exp()
        error[torch.arange(len(tokens)), tokens] -= 1
        found["log_perplexity"].append(float(-predicted[torch.arange(len(tokens)), tokens].mean()))
        found["el2n"].append(float(error.norm(dim=1).mean()))
        found["gradient_norm"].append(float((error @ head.to(error)).norm(dim=1).mean()))
    return {name: np.array(values) for name, values in found.items()}


def selected(
    keys: Floats, scores: Mapping[str, Floats], count: int, clusters: int, generator: np.random.Generator
) -> list[int]:
    """`count` rows, ascending.

    Args:
        keys: [n, d].
        scores: by name, [n].
    """
    means = MiniBatchKMeans(min(clusters, len(keys)), random_state=int(generator.integers(2**31)), n_init=3)
    of = means.fit_predict(keys)
    groups = [np.flatnonzero(of == cluster) for cluster in np.unique(of)]
    chosen: list[int] = []
    for group, room in zip(groups, shares([len(group) for group in groups], count), strict=True):
        name = max(scores, key=lambda name, group=group: entropy(scores[name][group]))
        chosen += [int(group[row]) for row in spread(scores[name][group], room, generator)]
    return sorted(chosen)


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """Of each cluster: equal, but no more than it has; what one leaves is shared by the others."""
    found = [0] * len(sizes)
    left = min(count, sum(sizes))
    while left:
        open_ones = [at for at, size in enumerate(sizes) if found[at] < size]
        each = max(1, left // len(open_ones))
        for at in open_ones:
            taken = min(each, sizes[at] - found[at], left)
            found[at] += taken
            left -= taken
    return found


def entropy(values: Floats) -> float:
    """Of the histogram over 50 equal bins, in nats."""
    counts, _ = np.histogram(values, BINS)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def spread(values: Floats, room: int, generator: np.random.Generator) -> list[int]:
    """Rows drawn equally from the bins of a score, its ends cut off; the ends again if there are too few."""
    low, high = np.quantile(values, (CUT, 1 - CUT))
    inner = (values >= low) & (values <= high)
    edges = np.linspace(low, high, BINS + 1)[1:-1]
    bins = [np.flatnonzero(inner & (np.digitize(values, edges) == at)) for at in range(BINS)]
    drawn = [generator.permutation(rows) for rows in bins]
    of_bins = shares([len(rows) for rows in drawn], room)
    chosen = [int(row) for rows, count in zip(drawn, of_bins, strict=True) for row in rows[:count]]
    rest = generator.permutation(np.flatnonzero(~inner))
    return [*chosen, *(int(row) for row in rest[: room - len(chosen)])]
