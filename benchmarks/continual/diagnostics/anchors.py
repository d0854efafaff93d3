"""How well the loss on anchors represents the loss on earlier tasks; and what anchors cost.

For the memory after each task but the first, of every seed: the mean NLL of the answers to the anchors of all earlier
tasks (A), and to as many held-out examples of the same tasks (H), none of which is an anchor. Each memory is one state.
Over the states: Pearson's and Spearman's correlation, the mean absolute gap |A - H|, and it relative to H. The same
over pairs of a memory and an earlier task. Nothing was trained on test questions, but the memory may have been on the
examples that became anchors; `--held-out train` takes training examples that are no anchors, so that nothing but the
draw differs. A run keeps the memories of all tasks with `--keep-states all`; how many are gone is counted.

Beside it, as in the paper's table "Anchor storage": how many anchors the last update used, their bytes, and those of
the memory.

Also from the paper's section "Anchor Protocol and Replay-Matched Controls".
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.statistics import correlation
from benchmarks.continual.methods.rehearsal import ANCHORS
from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.errors import ConfigError
from selector.backbone.bundled_model import BundledModel
from selector.backbone.extraction import extract_keys
from selector.backbone.scoring import Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.data.anchors import AnchorStore
from selector.data.examples import Example
from selector.report.plots import COLOURS

SOURCE = 'paper, "Empirical Validation of Anchor Representativeness"'
SPLITS = ("test", "train", "validation")
BATCH_SIZE = 64
MARKERS = "os^D"

Pair = tuple[float, float]  # mean NLL on anchors, and on held-out examples


@dataclass(frozen=True)
class Questions:
    """Examples with their keys."""

    examples: Sequence[Example]
    keys: Tensor  # [n, d] float32


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--held-out", choices=SPLITS, default="test", help="the split of held-out examples")
    parser.add_argument("--questions", type=int, help="held-out examples of each task (default: as many as anchors)")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    states = [state for run in runs for state in _states(finished, run, options.held_out, options.questions)]
    if not states:
        raise ConfigError(f"{runs[0].folder}: no memory of a task that another came before is there")
    by_memory = agreement([_mean(state["by_task"].values()) for state in states])
    by_task = agreement([pair for state in states for pair in state["by_task"].values()])
    return {
        "finding": _finding(runs[0], options.held_out, by_memory, by_task),
        "method": runs[0].method,
        "budget": runs[0].budget,
        "held_out": options.held_out,
        "memories_gone": sum(len(run.order) - 1 - len(remembered(run)) for run in runs),
        "states": states,
        "by_memory": by_memory,
        "by_memory_and_task": by_task,
        "storage": storage(runs),
    }


def agreement(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How well the first of two losses represents the second: correlations, and gaps (first less second).

    The relative gap is divided by the second.
    """
    anchors, held_out = np.array(pairs, np.float64).T  # [states] each
    gaps = anchors - held_out
    related = correlation(anchors.tolist(), held_out.tolist())
    return {
        "states": len(pairs),
        "pearson": related["pearson"],
        "spearman": related["spearman"],
        "mean_gap": float(gaps.mean()),
        "mean_absolute_gap": float(np.abs(gaps).mean()),
        "relative_gap": float((np.abs(gaps) / held_out).mean()) if (held_out > 0).all() else None,
    }


def disjoint(examples: Sequence[Example], anchors: Sequence[Example], count: int, seed: int) -> list[Example]:
    """At most `count` of the examples, drawn without repetition, of which none is an anchor, under whatever id."""
    taken = {anchor.source_digest for anchor in anchors}
    free = [example for example in examples if example.source_digest not in taken]
    rows = np.random.default_rng((seed, 7)).permutation(len(free))[:count]
    return [free[row] for row in sorted(rows.tolist())]


def storage(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Of the anchors that the last update used, beside the memory; bytes are means over seeds."""
    stored = [[task for task in AnchorStore(r.state() / ANCHORS).tasks() if task.run != r.order[-1]] for r in runs]
    anchors = statistics.mean(sum(task.bytes for task in earlier) for earlier in stored)
    memory = statistics.mean(run.artifact().stored_bytes for run in runs)
    return {
        "anchors": statistics.mean(sum(task.count for task in earlier) for earlier in stored),
        "anchor_bytes": anchors,
        "memory_bytes": memory,
        "ratio": anchors / memory,
    }


def remembered(run: FinishedRun) -> list[int]:
    """The tasks but the first whose memory was kept; by default a run keeps only the last one."""
    return [number for number in range(1, len(run.order)) if run.state(number).exists()]


def plot(measured: dict[str, Any]) -> Figure:
    figure = blank(3.6)
    axes = figure.add_subplot()
    tasks = list(dict.fromkeys(task for state in measured["states"] for task in state["by_task"]))
    for number, task in enumerate(tasks):
        pairs = [state["by_task"][task] for state in measured["states"] if task in state["by_task"]]
        marker, colour = MARKERS[number // len(COLOURS) % len(MARKERS)], COLOURS[number % len(COLOURS)]
        axes.plot(*zip(*pairs, strict=True), marker, color=colour, markersize=5, alpha=0.6, label=task)
    means = [_mean(state["by_task"].values()) for state in measured["states"]]
    axes.plot(*zip(*means, strict=True), "*", color="black", markersize=9, label="mean of a memory")
    everything = [value for state in measured["states"] for pair in state["by_task"].values() for value in pair]
    limits = [min(everything), max(everything)]
    axes.plot(limits, limits, ":", color="black", linewidth=1)
    axes.set(xlabel="NLL on anchors", ylabel=f"NLL on held-out examples ({measured['held_out']})")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _states(finished: Finished, run: FinishedRun, split: str, questions: int | None) -> list[dict[str, Any]]:
    """Of one run: for the memory after each task but the first, (anchor NLL, held-out NLL) by earlier task."""
    if not remembered(run):
        return []
    anchors, held_out = _questions(finished, run, split, questions)
    scorer = Scorer(finished.backbone, batch_size=BATCH_SIZE)
    states = []
    for number in remembered(run):
        bundled = BundledModel(scorer, run.bundle(number))
        with tiled_attention(finished.backbone):
            pairs = {
                task: tuple(bundled.mean_loss(of.examples, of.keys) for of in (anchors[task], held_out[task]))
                for task in run.order[:number]
            }
        states.append({"seed": run.seed, "after": run.order[number], "by_task": pairs})
    return states


def _questions(
    finished: Finished, run: FinishedRun, split: str, questions: int | None
) -> tuple[dict[str, Questions], dict[str, Questions]]:
    """Anchors and held-out examples of all tasks but the last, by task."""
    stored = AnchorStore(run.state() / ANCHORS).read()
    anchors, held_out = {}, {}
    for task in finished.suite.tasks[:-1]:
        mine = [anchor for anchor in stored if anchor.task == task.name]
        if not mine:
            raise ConfigError(f"{run.folder}: {run.method} keeps no anchors of {task.name}")
        others = disjoint(getattr(task, split), mine, questions or len(mine), run.seed)
        if not others:
            raise ConfigError(f"the {split} split of {task.name} holds nothing but anchors")
        anchors[task.name], held_out[task.name] = (
            Questions(examples, extract_keys(finished.backbone, examples, batch_size=BATCH_SIZE))
            for examples in (mine, others)
        )
    return anchors, held_out


def _mean(pairs: Iterable[Sequence[float]]) -> Pair:
    anchors, held_out = zip(*pairs, strict=True)
    return statistics.mean(anchors), statistics.mean(held_out)


def _finding(run: FinishedRun, split: str, by_memory: Mapping[str, Any], by_task: Mapping[str, Any]) -> str:
    def describe(agreed: Mapping[str, Any]) -> str:
        if agreed["pearson"] is None:
            return "no correlation can be given"
        return f"Pearson {agreed['pearson']:.2f}, Spearman {agreed['spearman']:.2f}"

    relative = "" if by_memory["relative_gap"] is None else f" ({by_memory['relative_gap']:.1%})"
    return (
        f"Over {by_memory['states']} memories of {run.method}, NLL on anchors and on held-out {split} examples of "
        f"earlier tasks: {describe(by_memory)}, mean gap (anchors less held-out) {by_memory['mean_gap']:+.3f}, "
        f"mean absolute gap {by_memory['mean_absolute_gap']:.3f}{relative}; over "
        f"{by_task['states']} pairs of a memory and a task: {describe(by_task)}."
    )
