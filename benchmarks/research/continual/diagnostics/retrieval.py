"""What memory gains by the entries that a question retrieves: by their hit rate, and by how ambiguous they are.

A question retrieves from all entries, or behind a relevance gate from those of its routed task; if the gate is closed
it retrieves nothing. Entries are ranked by cosine similarity with the question's key.

Shapes: n questions, B entries, k of them retrieved, d hidden size, H evidence of a question for a gate.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.research.continual.metrics import standard_error
from benchmarks.research.continual.results import Finished, FinishedRun, describe_runs
from benchmarks.research.drawing import COLOURS, blank, finite
from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone.bundled_model import BundledModel
from selector.backbone.gate_rule import routing
from selector.backbone.scoring import Scorer

HIT_RATE_BINS, AMBIGUITY_BINS = 5, 8
GROUPS = {"own_task": "most entries of its own task", "cross_task": "most entries of other tasks"}


@dataclass(frozen=True)
class Retrieval:
    """What one question retrieves."""

    gap: float  # g(x) = s_(1) - s_(2) of the two largest similarities (paper, Eq. sim_gap); NaN for a single entry
    hits: int  # of the retrieved entries, those of the question's own task
    retrieved: int  # k, or fewer if there are not so many

    @property
    def is_cross_task(self) -> bool:
        """Whether most retrieved entries belong to other tasks."""
        return 2 * self.hits < self.retrieved


@dataclass(frozen=True)
class Answered:
    """A question that got memory, and both answers to it."""

    task: str
    retrieval: Retrieval
    right: bool  # with memory
    right_without: bool  # the untouched model's

    @property
    def gain(self) -> int:
        """Delta(x), of exact match: -1, 0 or 1 (paper, Eq. per_example_gain)."""
        return self.right - self.right_without


def retrievals(bundle: Bundle, keys: Tensor, evidence: Tensor, task: str, top_k: int) -> list[Retrieval | None]:
    """Of n questions of `task` with keys [n, d] and evidence [n, H]; None if the gate is closed."""
    opened, log_prior = routing(bundle, evidence)  # [n], [n, B]
    scores = keys @ bundle.retrieval_keys.to(keys).T + log_prior  # [n, B], -inf for other tasks'
    ranked, entries = scores.sort(dim=1, descending=True, stable=True)
    tasks = [entry.task for entry in bundle.metadata.entries]
    results: list[Retrieval | None] = []
    for is_open, similarities, order in zip(opened.tolist(), ranked.tolist(), entries.tolist(), strict=True):
        available = sum(similarity > -math.inf for similarity in similarities)
        retrieved = order[: min(top_k, available)]
        gap = similarities[0] - similarities[1] if available > 1 else math.nan
        hits = sum(tasks[entry] == task for entry in retrieved)
        results.append(Retrieval(gap, hits, len(retrieved)) if is_open else None)
    return results


def answered_with_memory(finished: Finished, runs: Sequence[FinishedRun], top_k: int) -> tuple[list[Answered], int]:
    """All test questions after the last task, of every run: those that got memory, and how many did not."""
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, found {top_k}")
    answered, closed = [], 0
    for run in runs:
        bundled = BundledModel(Scorer(finished.backbone), run.bundle())
        rights = {(mine.task, mine.id): (mine.right, plain.right) for mine, plain in finished.paired(run)}
        for task in finished.suite.tasks:
            evidence = bundled.evidence(task.test)
            by_question = retrievals(run.bundle(), finished.keys(task), evidence, task.name, top_k)
            for example, retrieval in zip(task.test, by_question, strict=True):
                if retrieval is None:
                    closed += 1
                else:
                    answered.append(Answered(task.name, retrieval, *rights[task.name, example.id]))
    return answered, closed


def measure_hit_rate(finished: Finished, options: Namespace) -> dict[str, Any]:
    """The mean gain over the untouched model and both accuracies, with standard errors over questions and seeds.

    By the share of the k entries nearest to a question that were made from its own task (paper, Eq. hit_rate).
    """
    runs = finished.chosen(options)
    answered, closed = answered_with_memory(finished, runs, options.top_k)
    bins = hit_rate_bins(answered)
    gains = [f"{row['gain']['mean']:+.3f} from {row['from']:.0%} on" for row in bins if row["questions"]]
    finding = f"Mean gain over no memory by hit rate: {', '.join(gains) or 'no question got memory'}."
    return {"finding": finding, **describe_runs(runs), "top_k": options.top_k, "closed": closed, "bins": bins}


def hit_rate_bins(answered: Sequence[Answered]) -> list[dict[str, Any]]:
    """[0, 0.2), [0.2, 0.4) ... [0.8, 1] of the hit rate; means are None for an empty bin."""
    members: list[list[Answered]] = [[] for _ in range(HIT_RATE_BINS)]
    for question in answered:  # in whole numbers: 3 of 5 is in [0.6, 0.8) and not below it
        hits, retrieved = question.retrieval.hits, question.retrieval.retrieved
        members[min(HIT_RATE_BINS - 1, HIT_RATE_BINS * hits // retrieved)].append(question)
    return [
        {
            "from": number / HIT_RATE_BINS,
            "to": (number + 1) / HIT_RATE_BINS,
            "questions": len(inside),
            "gain": mean_and_error([question.gain for question in inside]),
            "accuracy": mean_and_error([question.right for question in inside]),
            "accuracy_without": mean_and_error([question.right_without for question in inside]),
        }
        for number, inside in enumerate(members)
    ]


def plot_hit_rate(measured: dict[str, Any]) -> Figure:
    figure = blank(3.4)
    axes = figure.add_subplot()
    bins = measured["bins"]
    places = [(row["from"] + row["to"]) / 2 for row in bins]
    for name, colour, marker in zip(("gain", "accuracy", "accuracy_without"), COLOURS, "os^", strict=False):
        means = np.array(finite([row[name]["mean"] for row in bins]))
        errors = np.nan_to_num(finite([row[name]["standard_error"] for row in bins]))
        axes.errorbar(places, means, errors, color=colour, marker=marker, capsize=2, label=name.replace("_", " "))
    axes.set_xticks(places, [f"{row['from']:.1f}–{row['to']:.1f}\nn = {row['questions']}" for row in bins])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel=f"hit rate of the top {measured['top_k']}", ylabel="means over no memory")
    axes.legend(frameon=False, fontsize=8)
    return figure


def measure_ambiguity(finished: Finished, options: Namespace) -> dict[str, Any]:
    """The gain over the untouched model by the gap g(x) of a question's two largest similarities (paper, Eq. sim_gap).

    The smaller, the more ambiguous. Bins of g hold equally many questions of all seeds.

    Raises:
        ConfigError: no question has two entries to retrieve.
    """
    runs = finished.chosen(options)
    answered, closed = answered_with_memory(finished, runs, options.top_k)
    clear = [question for question in answered if not math.isnan(question.retrieval.gap)]
    if not clear:
        raise ConfigError(
            f"no question of {runs[0].method} has two entries to retrieve: there is no ambiguity to measure"
        )
    crossing = sum(question.retrieval.is_cross_task for question in clear) / len(clear)
    gain = float(np.mean([question.gain for question in clear]))
    return {
        "finding": f"{crossing:.1%} of {len(clear)} answers retrieve mostly from other tasks; mean gain {gain:+.3f}.",
        **describe_runs(runs),
        "top_k": options.top_k,
        "closed": closed,
        "questions": len(clear),
        "bins": ambiguity_bins(clear),
    }


def ambiguity_bins(answered: Sequence[Answered]) -> dict[str, list[dict[str, Any]]]:
    """Of each group in each bin: the number of questions, their mean gap, and mean gain with its standard error.

    The bins are the same for both groups; a group's empty bins are left out.
    """
    gaps = np.array([question.retrieval.gap for question in answered])
    edges = np.unique(np.quantile(gaps, np.linspace(0, 1, AMBIGUITY_BINS + 1)[1:-1]))  # the inner ones
    members: dict[tuple[str, int], list[Answered]] = {}
    for question, number in zip(answered, np.digitize(gaps, edges).tolist(), strict=True):
        group = "cross_task" if question.retrieval.is_cross_task else "own_task"
        members.setdefault((group, number), []).append(question)
    return {
        group: [
            {
                "bin": number,
                "questions": len(inside),
                "gap": float(np.mean([question.retrieval.gap for question in inside])),
                "gain": float(np.mean([question.gain for question in inside])),
                "standard_error": standard_error([question.gain for question in inside]),
            }
            for (of_group, number), inside in sorted(members.items())
            if of_group == group
        ]
        for group in GROUPS
    }


def plot_ambiguity(measured: dict[str, Any]) -> Figure:
    figure = blank(3.6)
    axes = figure.add_subplot()
    for (group, label), colour, marker in zip(GROUPS.items(), COLOURS, "ox", strict=False):
        if line := measured["bins"][group]:
            gaps, gains = [row["gap"] for row in line], [row["gain"] for row in line]
            errors = np.nan_to_num(finite([row["standard_error"] for row in line]))
            axes.errorbar(gaps, gains, errors, color=colour, marker=marker, capsize=2, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="g(x): gap between the two largest similarities", ylabel="mean gain over no memory")
    axes.legend(frameon=False, fontsize=8)
    return figure


def mean_and_error(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard error (NaN for a single value); both None for no value."""
    if not values:
        return {"mean": None, "standard_error": None}
    return {"mean": float(np.mean(values)), "standard_error": standard_error(values)}
