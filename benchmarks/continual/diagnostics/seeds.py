"""How far the scores of each method depend on the seed, and which differences between methods are larger than that.

    python -m benchmarks.continual.diagnostics seeds --out DIR [--method M] [--budget B]

For AP, AF and the accuracy on base questions after the last task: mean, standard deviation (n - 1) and standard error
over seeds, of every method and budget; and what M is ahead of each other method of the same budget, seed by seed, with
the standard error of these paired differences and the 95% interval of Student's t. The seed draws anchors, batches,
starts of training and first entries; the data are the same.

Source: the paper's section "Statistical Reporting Protocol", table "Seed-level stability".
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.comparison import paired
from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.groups import grouped
from benchmarks.continual.diagnostics.spread import plus_minus, spread
from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Statistical Reporting Protocol"'
SCORES = {"AP": "AP", "AF": "AF (less is better)", "base_final": "base questions, after the last task"}

Scores = Mapping[int, float]  # by seed


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    """
    Raises:
        ConfigError: there is no finished run of the method, or none with one of the seeds.
    """
    reference = finished.chosen(options)
    own = _by_score(reference)
    rows, differences = [], []
    for (method, budget), runs in grouped(finished.complete, options.seed).items():
        scores = _by_score(runs)
        rows.append(
            {
                "method": method,
                "budget": budget,
                "seeds": [run.seed for run in runs],
                "scores": {
                    name: {"values": list(of.values()), **spread(list(of.values()))} for name, of in scores.items()
                },
            }
        )
        if budget == reference[0].budget and method != reference[0].method:
            found = {name: paired_difference(own[name], scores[name]) for name in SCORES}
            differences.append({"method": method, "budget": budget, "scores": found})
    return {
        "diagnostic": "seeds",
        "source": SOURCE,
        "says": _says(reference[0].method, reference[0].budget, rows, differences),
        "compared": {"method": reference[0].method, "budget": reference[0].budget},
        "methods": rows,
        "ahead_of": differences,
    }


def paired_difference(one: Scores, other: Scores) -> dict[str, Any]:
    """Of the seeds that both have: one's score less the other's.

    "interval" is where the mean over all seeds lies with 95% confidence, if differences are normally distributed. All
    but the seeds are None where no seed is common, and the errors where only one is.
    """
    found = paired(one, other)
    if found is None:
        return {"seeds": [], "mean": None, "standard_error": None, "interval": None}
    return {
        "seeds": list(found.seeds),
        "mean": found.value,
        "standard_error": found.standard_error,
        "interval": None if found.margin is None else [found.value - found.margin, found.value + found.margin],
    }


def plot(found: dict[str, Any]) -> Figure:
    figure = blank(1.0 + 0.3 * len(found["methods"]))
    for number, (name, label) in enumerate(SCORES.items()):
        axes = figure.add_subplot(1, len(SCORES), number + 1)
        for place, row in enumerate(found["methods"]):
            score, colour = row["scores"][name], COLOURS[place % len(COLOURS)]
            axes.plot(score["values"], [place] * len(score["values"]), "o", color=colour, markersize=4, alpha=0.5)
            axes.errorbar(
                score["mean"], place, xerr=score["standard_error"], fmt="|", color="black", markersize=9, capsize=3
            )
        names = [f"{row['method']}, {row['budget']}" for row in found["methods"]]
        axes.set_yticks(range(len(names)), names if number == 0 else [])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set(xlabel=label)
    figure.suptitle("One dot a seed; mean and standard error", fontsize=9)
    return figure


def _by_score(runs: Sequence[FinishedRun]) -> dict[str, Scores]:
    for run in runs:
        if missing := sorted(SCORES.keys() - run.matrix["metrics"].keys()):
            raise ConfigError(f"{run.folder}: the results have no metric {missing[0]!r}")
    return {name: {run.seed: run.matrix["metrics"][name] for run in runs} for name in SCORES}


def _says(method: str, budget: int, rows: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]]) -> str:
    row = next(row for row in rows if (row["method"], row["budget"]) == (method, budget))
    ap = row["scores"]["AP"]
    said = (
        f"AP of {method} (budget {budget}) over {len(row['seeds'])} seeds is "
        f"{plus_minus(ap['mean'], ap['standard_error'])} (standard error)"
    )
    others = {one["method"]: one["scores"]["AP"] for one in differences}
    ahead = [name for name, one in others.items() if one["interval"] and one["interval"][0] > 0]
    behind = [name for name, one in others.items() if one["interval"] and one["interval"][1] < 0]
    open_ = [name for name in others if name not in (*ahead, *behind)]
    verdicts = (("ahead of", ahead), ("behind", behind), ("not told apart from", open_))
    told = [f"{verdict} {', '.join(names)}" for verdict, names in verdicts if names]
    return f"{said}; with 95% confidence, seed by seed, it is {'; '.join(told)}." if told else f"{said}."
