"""Measures the paper's recipe on the first task of a stream against entries chosen without optimisation.

    python -m benchmarks.selector.paper_recipe --data DIR [--model DIR] [--task guild] [--seeds 0 1 2] [--work DIR]

DIR is what `python -m benchmarks.demo.world --out DIR` or `python -m benchmarks.real.stream --out DIR` writes. For each
seed: the selected memory (the bundle, and relaxed), random and k-center memories of the same budget, each of these with
the starting calibration and with the one the selection has fitted, and no memory at all; mean NLL on held-out test
examples. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.continual.results import weights_digest
from benchmarks.machine import describe_machine
from selector.backbone.extraction import extract_keys
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.anchors import examples_digest
from selector.data.examples import Example, read_task
from selector.paper.settings import PaperSettings
from selector.paper.update import update_paper
from selector.runtime.checkpoint import Checkpoint, identity_digest
from selector.update.build import build_bundle
from selector.update.inputs import TaskInputs
from selector.update.result import UpdateResult
from selector.update.settings import BuildSettings
from server.demo import CHECKPOINT

Splits = Mapping[str, Sequence[Example]]


def main() -> int:
    parser = first_task_parser(__doc__, budget=32, iterations=100, threads=0)
    parser.add_argument("--gamma", type=float, default=0.1)
    parser.add_argument("--step-rule", choices=("plain", "normalized"), default="plain")
    parser.add_argument("--full-pool", action="store_true")
    parser.add_argument("--work", type=Path, help="keep progress here: a stopped selection goes on, in its own folder")
    options = parser.parse_args()
    backbone, splits = load_first_task(options)
    questions = Questions(splits["test"], extract_keys(backbone, splits["test"]))
    scorer = Scorer(backbone)
    runs = []
    for seed in options.seeds:
        runs.append(measure(backbone, scorer, questions, splits, seed, options))
        print(json.dumps(runs[-1]), file=sys.stderr)
    methods = runs[0]["test_nll"]
    means = {name: statistics.mean(run["test_nll"][name] for run in runs) for name in methods}
    print_report("paper_recipe", options, runs=runs, mean_test_nll=means)
    return 0


def measure(
    backbone: Backbone, scorer: Scorer, questions: Questions, splits: Splits, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One seed."""
    settings = PaperSettings(
        budget=options.budget,
        beta=0.0,  # the first task has no anchors
        gamma=options.gamma,
        iterations=options.iterations,
        step_rule=options.step_rule,
        shortlist=None if options.full_pool else 8,
        seed=seed,
    )
    folder = options.work and options.work / progress_name(options.model, options.task, splits, settings)
    done = select_first(backbone, splits, settings, progress=True, folder=folder)
    selected = Memory.from_bundle(done.bundle)
    losses = {"no memory": scorer.mean_loss(questions), "selected": scorer.mean_loss(questions, selected)}
    for policy in ("random", "k-center"):
        build = BuildSettings(budget=options.budget, policy=policy, seed=seed)
        memory = Memory.from_bundle(build_bundle(backbone, splits["train"], build))
        losses[f"{policy}, starting calibration"] = scorer.mean_loss(questions, memory)
        fitted = replace(memory, temperature=selected.temperature, value_gates=selected.value_gates)
        losses[f"{policy}, the selection's calibration"] = scorer.mean_loss(questions, fitted)
    history = done.report["history"]

    def ends(term: str) -> dict[str, float]:
        parts = {"mean_of_first_10": history[:10], "mean_of_last_10": history[-10:]}
        return {name: statistics.mean(step[term] for step in part) for name, part in parts.items()}

    return {
        "seed": seed,
        "test_nll": losses,
        "validation_nll": done.report["validation_nll"],
        "objective": ends("objective"),
        "current": ends("current"),
        **{name: done.report[name] for name in ("rounding", "calibration", "phases")},
    }


def progress_name(model: Path, task: str, splits: Splits, settings: PaperSettings) -> str:
    """Another one for everything that changes the selection."""
    identity = {
        "settings": settings.model_dump(mode="json"),
        "weights": weights_digest(model),
        "examples": {split: examples_digest(examples) for split, examples in splits.items()},
    }
    return f"{task}-{identity_digest(identity)[:16]}"


def first_task_parser(
    description: str | None, *, budget: int, iterations: int, threads: int
) -> argparse.ArgumentParser:
    """The options of a measurement on the first task of a stream; the numbers are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--task", default="guild")
    parser.add_argument("--budget", type=int, default=budget)
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=threads)
    return parser


def load_first_task(options: argparse.Namespace) -> tuple[Backbone, Splits]:
    """The model, and the task's examples by split."""
    disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = options.data / options.task
    splits = {split: read_task(folder / f"{split}.jsonl") for split in ("train", "validation", "test")}
    return Backbone.load(options.model), splits


def select_first(
    backbone: Backbone, splits: Splits, settings: PaperSettings, *, progress: bool = False, folder: Path | None = None
) -> UpdateResult:
    """The paper's selection for the first task of a stream; from its beginning, or from the progress in `folder`.

    The reported seconds of its phases are those of this process.
    """
    inputs = TaskInputs(splits["train"], splits["validation"], (), None)
    with tempfile.TemporaryDirectory() as scratch:
        if folder is not None:
            folder.parent.mkdir(parents=True, exist_ok=True)
        checkpoint, _ = Checkpoint.open(folder or Path(scratch) / "run", {})
        return update_paper(backbone, inputs, settings, checkpoint, progress=progress)


def print_report(name: str, options: argparse.Namespace, **measured: Any) -> None:
    """The JSON line; of paths among the options only the last part is printed."""
    settings = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    print(json.dumps({"benchmark": name, "settings": settings, "machine": describe_machine(), **measured}))


if __name__ == "__main__":
    sys.exit(main())
