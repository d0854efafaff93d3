"""How alike the keys of a memory are, beside a memory selected without the coverage term, and random entries.

Three rules choose entries after each task: the method's own selection; the same with gamma = 0, if the run has that
method, in its own stream; and as many entries drawn at random from the method's pool. Of each set all
pairwise cosines (paper, Eq. selected_pairwise_cosine) and log det(C + 1e-3 I) of its keys projected to 256 dimensions
(Eq. logdet_cov_eval): the higher, the more diverse.

The pool is the previous memory and the task's training examples. Only states that the run has kept are measured; if
the previous one is gone, the pool is the training examples of all tasks so far.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.research.continual.results import Finished, FinishedRun, describe_runs
from benchmarks.research.drawing import COLOURS, STROKES, blank, finite, name_ticks
from selector.backbone.extraction import extract_keys
from selector.update.coverage import Coverage

SELECTED, WITHOUT_COVERAGE, RANDOM = "selected", "without_coverage", "random"
NO_COVERAGE = "paper_no_coverage"  # the method
LABELS = {SELECTED: "as selected", WITHOUT_COVERAGE: "gamma = 0", RANDOM: "random"}
DRAWS = 10  # random sets of each pool


@dataclass(frozen=True)
class Chosen:
    """One set of entries."""

    rule: str
    task: str  # after which it stood
    keys: Tensor  # [B, d] float32, unit norm
    pool: int  # how many entries it was chosen from


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs, other = finished.chosen(options), NO_COVERAGE
    pools = Pools(finished)
    sets = [chosen for run in runs for chosen in selected_and_random(run, pools)]
    if finished.has(other):
        others = [chosen for run in runs for chosen in selected_and_random(finished.counterpart(run, other), pools)]
        sets += [replace(chosen, rule=WITHOUT_COVERAGE) for chosen in others if chosen.rule == SELECTED]
    rules = {rule: means([chosen for chosen in sets if chosen.rule == rule]) for rule in LABELS}
    return {
        "finding": "Mean cosine of two keys: "
        + ", ".join(f"{row['cosine']:.3f} {rule}" for rule, row in rules.items() if row["cosine"] is not None),
        **describe_runs(runs),
        "without_coverage": other if finished.has(other) else None,
        "rules": rules,
        "tasks": [
            {"task": task} | {rule: means([c for c in sets if (c.rule, c.task) == (rule, task)]) for rule in LABELS}
            for task in dict.fromkeys(chosen.task for chosen in sets)
        ],
    }


class Pools:
    """What could be selected, by task; training keys are computed once."""

    def __init__(self, finished: Finished) -> None:
        self.finished = finished
        self._keys: dict[str, Tensor] = {}

    def training_keys(self, number: int) -> Tensor:
        """Of the training examples of a task, rounded as a bundle's: [number of them, d] float32."""
        task = self.finished.suite.tasks[number]
        if task.name not in self._keys:
            keys = extract_keys(self.finished.backbone, task.train, batch_size=64)
            self._keys[task.name] = keys.half().float()
        return self._keys[task.name]

    def pool(self, run: FinishedRun, number: int) -> Tensor:
        """Of task `number` in this run: [N, d] float32."""
        if number == 0:
            return self.training_keys(0)
        if run.state(number - 1).exists():
            return torch.cat([run.bundle(number - 1).retrieval_keys.float(), self.training_keys(number)])
        return torch.cat([self.training_keys(earlier) for earlier in range(number + 1)])


def selected_and_random(run: FinishedRun, pools: Pools) -> list[Chosen]:
    """The memory after each task whose state was kept, and random sets of its size from its pool."""
    sets = []
    for number, task in enumerate(run.order):
        if not run.state(number).exists():
            continue
        keys, pool = run.bundle(number).retrieval_keys.float(), pools.pool(run, number)
        sets.append(Chosen(SELECTED, task, keys, len(pool)))
        rng = np.random.default_rng((run.seed, number))
        for _ in range(DRAWS):
            rows = np.sort(rng.choice(len(pool), min(len(keys), len(pool)), replace=False))
            sets.append(Chosen(RANDOM, task, pool[torch.from_numpy(rows)], len(pool)))
    return sets


def logdet(keys: Tensor) -> float:
    """How a set of unit keys [B, d] spreads: log det of its coverage matrix."""
    B = len(keys)
    return -float(Coverage.of_keys(keys, B).value(torch.ones(B, dtype=torch.float64)))


def means(sets: Sequence[Chosen]) -> dict[str, Any]:
    """Means over sets; None without sets, and for cosines if every set is a single entry."""
    values = {
        "entries": [len(chosen.keys) for chosen in sets],
        "pool": [chosen.pool for chosen in sets],
        "logdet": [logdet(chosen.keys) for chosen in sets],
        "cosine": [float(pairwise_cosines(chosen.keys).mean()) for chosen in sets if len(chosen.keys) > 1],
    }
    return {"sets": len(sets)} | {name: float(np.mean(of)) if of else None for name, of in values.items()}


def plot(measured: dict[str, Any]) -> Figure:
    figure = blank(3.6)
    names = [row["task"] for row in measured["tasks"]]
    panels = (("cosine", "mean cosine of two keys"), ("logdet", "log det of coverage"))
    for axes, (name, axis) in zip(figure.subplots(1, 2), panels, strict=True):
        for (rule, label), colour, stroke in zip(LABELS.items(), COLOURS, STROKES, strict=False):
            if measured["rules"][rule]["sets"]:
                values = finite([row[rule][name] for row in measured["tasks"]])
                axes.plot(range(len(names)), values, stroke, marker="o", markersize=3, color=colour, label=label)
        name_ticks(axes, names)
        axes.set(xlabel="after task", ylabel=axis)
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def pairwise_cosines(keys: Tensor) -> NDArray[np.float64]:
    """Cosines of all pairs i < j of unit vectors [B, d] (paper, Eq. selected_pairwise_cosine): [B (B - 1) / 2]."""
    upper = np.triu_indices(len(keys), k=1)
    cosines: NDArray[np.float64] = (keys.double() @ keys.double().T).clamp(-1, 1).numpy()[upper]
    return cosines
