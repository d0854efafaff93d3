"""What the shortlist saves, and what it costs: the paper's recipe over M = 8B candidates against the full pool.

    python -m benchmarks.selector.shortlist --data DIR [--budget 16] [--iterations 20] [--seeds 0 1 2]

DIR is what `python -m benchmarks.demo.world --out DIR` writes. For every seed, in turn: a shortlist of the nearest
candidates, a random one of the same size (the control), and the full pool; the seconds of the selection alone, and the
mean NLL of held-out test answers under the deployed memory. Ends in one JSON line, with ratios to the full pool.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks.selector.paper_recipe import Splits, first_task_parser, load_first_task, print_report, select_first
from selector.backbone.extraction import extract_keys
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.paper.settings import PaperSettings

ARMS: dict[str, dict[str, Any]] = {
    "shortlist": {"shortlist": 8},
    "random shortlist": {"shortlist": 8, "shortlist_policy": "random"},
    "full pool": {"shortlist": None},
}


def main() -> int:
    options = first_task_parser(__doc__, budget=16, iterations=20, threads=1).parse_args()
    backbone, splits = load_first_task(options)
    questions = Questions(splits["test"], extract_keys(backbone, splits["test"], batch_size=64))
    runs = [
        {"arm": arm, "seed": seed} | measure(backbone, questions, splits, seed, arm, options)
        for seed in options.seeds
        for arm in ARMS
    ]
    print_report("shortlist", options, runs=runs, summary={arm: summary(runs, arm) for arm in ARMS})
    return 0


def measure(
    backbone: Backbone, questions: Questions, splits: Splits, seed: int, arm: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One seed of one arm."""
    settings = PaperSettings(
        budget=options.budget, beta=0.0, gamma=0.1, iterations=options.iterations, seed=seed, **ARMS[arm]
    )
    done = select_first(backbone, splits, settings)
    seconds = {phase["name"]: phase["seconds"] for phase in done.report["phases"]}
    return {
        "candidates": done.report["pool"]["candidates"],
        "seconds": round(seconds["shortlist"] + seconds["select"], 3),
        "test_nll": Scorer(backbone, batch_size=32).mean_loss(questions, Memory.from_bundle(done.bundle)),
    }


def summary(runs: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Against the full pool of the same seed: ratio of seconds, and difference in NLL with its standard error."""
    mine = [run for run in runs if run["arm"] == arm]
    full = [run for run in runs if run["arm"] == "full pool"]
    drops = [a["test_nll"] - b["test_nll"] for a, b in zip(mine, full, strict=True)]
    return {
        "candidates": mine[0]["candidates"],
        "time_ratio": statistics.median(a["seconds"] / b["seconds"] for a, b in zip(mine, full, strict=True)),
        "nll_difference": statistics.mean(drops),
        "standard_error": statistics.stdev(drops) / len(drops) ** 0.5 if len(drops) > 1 else None,
        "test_nll": statistics.mean(run["test_nll"] for run in mine),
    }


if __name__ == "__main__":
    sys.exit(main())
