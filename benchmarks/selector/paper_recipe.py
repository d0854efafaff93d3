"""Measures the paper's recipe on the first task of a stream against entries chosen without optimisation.

    python -m benchmarks.selector.paper_recipe --data DIR [--model DIR] [--task guild] [--seeds 0 1 2]

DIR is what `python -m benchmarks.demo.world --out DIR` writes. For every seed: the selected memory (the bundle, and
relaxed), random and k-center memories of the same budget, each of these with the starting calibration and with the one
the selection has fitted, and no memory at all; mean NLL on held-out test examples. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import describe_machine
from selector.backbone.extraction import extract_keys
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.examples import Example, read_task
from selector.paper.settings import PaperSettings
from selector.paper.update import update_paper
from selector.runtime.checkpoint import Checkpoint
from selector.update.build import build_bundle
from selector.update.inputs import TaskInputs
from selector.update.result import UpdateResult
from selector.update.settings import BuildSettings
from server.demo import CHECKPOINT


def main() -> int:
    options = _parser().parse_args()
    disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    backbone = Backbone.load(options.model)
    folder = options.data / options.task
    test = read_task(folder / "test.jsonl")
    questions = Questions(test, extract_keys(backbone, test))
    scorer = Scorer(backbone)
    runs = []
    for seed in options.seeds:
        runs.append(measure(backbone, scorer, questions, folder, seed, options))
        print(json.dumps(runs[-1]), file=sys.stderr)
    methods = runs[0]["test_nll"]
    report = {
        "benchmark": "paper_recipe",
        "settings": settings_of(options),
        "machine": describe_machine(),
        "runs": runs,
        "mean_test_nll": {name: statistics.mean(run["test_nll"][name] for run in runs) for name in methods},
    }
    print(json.dumps(report))
    return 0


def measure(
    backbone: Backbone, scorer: Scorer, questions: Questions, folder: Path, seed: int, options: argparse.Namespace
) -> dict:
    """One seed."""
    training, validation = (read_task(folder / f"{split}.jsonl") for split in ("train", "validation"))
    settings = PaperSettings(
        budget=options.budget,
        beta=0.0,  # the first task has no anchors
        gamma=options.gamma,
        iterations=options.iterations,
        step_rule=options.step_rule,
        shortlist=None if options.full_pool else 8,
        seed=seed,
    )
    done = select_first(backbone, training, validation, settings, progress=True)
    selected = Memory.from_bundle(done.bundle)
    losses = {"no memory": scorer.mean_loss(questions), "selected": scorer.mean_loss(questions, selected)}
    for policy in ("random", "k-center"):
        build = BuildSettings(budget=options.budget, policy=policy, seed=seed)
        memory = Memory.from_bundle(build_bundle(backbone, training, build))
        losses[f"{policy}, starting calibration"] = scorer.mean_loss(questions, memory)
        fitted = replace(memory, temperature=selected.temperature, value_gates=selected.value_gates)
        losses[f"{policy}, the selection's calibration"] = scorer.mean_loss(questions, fitted)
    history, report = done.report["history"], done.report

    def ends(term: str) -> dict[str, float]:
        parts = {"mean_of_first_10": history[:10], "mean_of_last_10": history[-10:]}
        return {name: statistics.mean(step[term] for step in part) for name, part in parts.items()}

    return {
        "seed": seed,
        "test_nll": losses,
        "validation_nll": report["validation_nll"],
        "objective": ends("objective"),
        "current": ends("current"),
        "rounding": report["rounding"],
        "calibration": report["calibration"],
        "phases": report["phases"],
    }


def settings_of(options: argparse.Namespace) -> dict:
    """The command's options as JSON values; where files lie is left out."""
    return {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}


def select_first(
    backbone: Backbone,
    training: Sequence[Example],
    validation: Sequence[Example],
    settings: PaperSettings,
    *,
    progress: bool = False,
) -> UpdateResult:
    """The paper's selection for the first task of a stream, from its beginning."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, _ = Checkpoint.open(Path(folder) / "run", {})
        return update_paper(
            backbone, TaskInputs(training, validation, (), None), settings, checkpoint, progress=progress
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--task", default="guild")
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--gamma", type=float, default=0.1)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--step-rule", choices=("plain", "normalized"), default="plain")
    parser.add_argument("--full-pool", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
