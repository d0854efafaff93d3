"""What the shortlist saves, and what it costs: the paper's recipe over M = 8B candidates against the full pool.

    python -m benchmarks.selector.shortlist --data DIR [--budget 16] [--iterations 20] [--seeds 0 1 2]

DIR is what `python -m benchmarks.demo.world --out DIR` writes. For every seed, in turn: a shortlist of the nearest
candidates, a random one of the same size (the control), and the full pool; the seconds of the selection alone, and the
mean NLL of held-out test answers under the deployed memory. Ends in one JSON line, with ratios to the full pool.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import describe_machine
from benchmarks.selector.paper_recipe import select_first, settings_of
from selector.backbone.extraction import extract_keys
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.examples import read_task
from selector.paper.settings import PaperSettings
from server.demo import CHECKPOINT

ARMS = {
    "shortlist": {"shortlist": 8},
    "random shortlist": {"shortlist": 8, "shortlist_policy": "random"},
    "full pool": {"shortlist": None},
}


def main() -> int:
    options = _parser().parse_args()
    disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    backbone, folder = Backbone.load(options.model), options.data / options.task
    test = read_task(folder / "test.jsonl")
    questions = Questions(test, extract_keys(backbone, test, batch_size=64))
    runs = [
        {"arm": arm, "seed": seed} | measure(backbone, questions, folder, seed, arm, options)
        for seed in options.seeds
        for arm in ARMS
    ]
    print(
        json.dumps(
            {
                "benchmark": "shortlist",
                "settings": settings_of(options),
                "machine": describe_machine(),
                "runs": runs,
                "summary": {arm: summary(runs, arm) for arm in ARMS},
            }
        )
    )
    return 0


def measure(
    backbone: Backbone, questions: Questions, folder: Path, seed: int, arm: str, options: argparse.Namespace
) -> dict:
    """One seed of one arm."""
    training, validation = (read_task(folder / f"{split}.jsonl") for split in ("train", "validation"))
    settings = PaperSettings(
        budget=options.budget, beta=0.0, gamma=0.1, iterations=options.iterations, seed=seed, **ARMS[arm]
    )
    done = select_first(backbone, training, validation, settings)
    seconds = {phase["name"]: phase["seconds"] for phase in done.report["phases"]}
    return {
        "candidates": done.report["pool"]["candidates"],
        "seconds": round(seconds["shortlist"] + seconds["select"], 3),
        "test_nll": Scorer(backbone, batch_size=32).mean_loss(questions, Memory.from_bundle(done.bundle)),
    }


def summary(runs: list[dict], arm: str) -> dict:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--task", default="guild")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
