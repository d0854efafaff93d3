r"""What the search for a task's training costs and loses, beside finishing every training.

    python -m benchmarks.continual.halving --suite demo-search --out FILE
    python -m benchmarks.continual.halving --suite real-text --model DIR --tasks continent element \
        --steps 100 --train 128 --test 48 --out FILE

Every training of `selector.refined.candidates` is finished, and compared at the search's rungs on the way. *Halving* is
what the search would have finished. *All, by loss* is the one with the least validation loss at the end, *all, by
accuracy* the latest activation whose validation accuracy is within one standard error of the best, which was the rule
before the search. FILE has what is done, so the command goes on where it ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.continual.late_layers import problem_of
from benchmarks.continual.suites import load_suite
from benchmarks.machine import describe_machine
from inducekv_vllm.bundle.activation import ACTIVATIONS
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions
from selector.backbone.tiled_attention import tiled_attention
from selector.backbone.token_values import layers_of_gate
from selector.refined.candidates import RUNGS, Candidate, active_from, best_first, every_candidate, rung_step
from selector.refined.settings import RefinedSettings
from selector.runtime.checkpoint import Checkpoint
from selector.runtime.files import replace_file
from server.demo import CHECKPOINT

Trained = Mapping[str, Any]  # of JSON: a finished training


def main() -> int:
    args = parse_arguments()
    suite = load_suite(args.suite, args.out.with_name(f"data-{args.suite}")).limited(args.train, args.test, base=1)
    backbone = Backbone.load(args.model)
    layer = layers_of_gate(backbone.num_layers)[-1]
    settings = RefinedSettings(steps=args.steps, patience=None, precision="float32")
    trained = json.loads(args.out.read_bytes())["trained"] if args.out.exists() else []
    done = {(each["task"], each["name"]) for each in trained}
    for task in suite.ordered(args.tasks).tasks if args.tasks else suite.tasks:
        problem, test = problem_of(task, backbone, settings)
        for candidate in every_candidate(problem, settings, layer):
            if (task.name, candidate.name) in done:
                continue
            trained.append({"task": task.name, "name": candidate.name, **finished(candidate, test)})
            facts = {"benchmark": "halving", "suite": args.suite, "model": Path(args.model).name, "steps": args.steps}
            facts |= {"rungs": RUNGS, "train_limit": args.train, "test_limit": args.test}
            result = {**facts, "trained": trained, "machine": describe_machine()}
            replace_file(args.out, (json.dumps(result, indent=1) + "\n").encode())
            print(f"{task.name}, {candidate.title}", file=sys.stderr)
    show(trained)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.continual.halving", description=__doc__)
    parser.add_argument("--suite", default="demo-search")
    parser.add_argument("--model", default=str(CHECKPOINT))
    parser.add_argument("--tasks", nargs="+", help="only these")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--train", type=int, default=256, help="training examples of each task")
    parser.add_argument("--test", type=int, default=64, help="test questions of each task")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def finished(candidate: Candidate, test: Questions) -> dict[str, Any]:
    """A training, and its losses at the rungs; the seconds are those of its steps."""
    training, scorer = candidate.training, candidate.training.problem.scorer
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder, tiled_attention(scorer.backbone):
        checkpoint = Checkpoint(Path(folder))
        for step in [*(rung_step(share, training.settings) for share, _ in RUNGS), training.settings.steps]:
            began = time.perf_counter()
            while training.step < step:
                training.take_step()
            seconds += time.perf_counter() - began
            training.compare(step, checkpoint, candidate.name)
        memory, validation = training.memory(), training.problem.validation
        asked = active_from(scorer, test, candidate.activation)
        return {
            "activation": candidate.activation,
            "first_layer": candidate.first_layer,
            "learning_rate": training.learning_rate,
            "seconds": seconds,
            # At the rungs, and at the end.
            "losses": [[round(loss, 4) for loss in losses] for _, losses in sorted(training.compared.items())],
            "validation": scorer.accuracy(validation, memory),
            "validation_questions": len(validation),
            "test": scorer.accuracy(asked, memory),
        }


def halved(trained: Sequence[Trained]) -> tuple[Trained, float]:
    """What the search finishes, and the seconds of all its training steps."""
    left, seconds = list(trained), {each["name"]: 0.0 for each in trained}
    for rung, (share, kept) in enumerate(RUNGS):
        if len(left) > kept:
            seconds |= {each["name"]: share * each["seconds"] for each in left}
            losses = [torch.tensor(each["losses"][rung]) for each in left]
            left = [left[row] for row in best_first(losses, [_lateness(each) for each in left])[:kept]]
    seconds[left[0]["name"]] = left[0]["seconds"]
    return left[0], sum(seconds.values())


def by_halving(trained: Sequence[Trained]) -> Trained:
    return halved(trained)[0]


def by_loss(trained: Sequence[Trained]) -> Trained:
    return min(trained, key=_last_loss)


def by_accuracy(trained: Sequence[Trained]) -> Trained:
    """The rule before the search; an activation's best is that of the least loss."""
    best: dict[tuple[int, int], Trained] = {}
    for each in sorted(trained, key=_last_loss):
        best.setdefault(_lateness(each), each)
    highest = max(each["validation"] for each in best.values())
    least = highest - math.sqrt(highest * (1 - highest) / trained[0]["validation_questions"])
    return [best[place] for place in sorted(best) if best[place]["validation"] >= least][-1]


def _last_loss(trained: Trained) -> float:
    return float(np.mean(trained["losses"][-1]))


def _lateness(trained: Trained) -> tuple[int, int]:
    return ACTIVATIONS.index(trained["activation"]), trained["first_layer"]


RULES: Final = {"halving": by_halving, "all, by loss": by_loss, "all, by accuracy": by_accuracy}


def show(trained: Sequence[Trained]) -> None:
    """Test accuracy of each rule and their paired differences, and the search's time in mean trainings."""
    table = Table("task", "trainings", "halving takes", *RULES)
    rows = []
    for task in dict.fromkeys(each["task"] for each in trained):
        own = [each for each in trained if each["task"] == task]
        time_of_search = halved(own)[1] / np.mean([each["seconds"] for each in own])
        rows.append([len(own), time_of_search, *(rule(own)["test"] for rule in RULES.values())])
        table.add_row(task, *(f"{each:.3g}" if isinstance(each, int) else f"{each:.3f}" for each in rows[-1]))
    table.add_row("mean", *(f"{each:.3f}" for each in np.mean(rows, axis=0)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    accuracies = np.array([row[2:] for row in rows])  # [tasks, rules]
    for first, second in itertools.combinations(range(len(RULES)), 2):
        gained = accuracies[:, first] - accuracies[:, second]
        error = gained.std(ddof=1) / math.sqrt(len(gained)) if len(gained) > 1 else math.nan
        print(f"{[*RULES][first]} less {[*RULES][second]}: {gained.mean():+.3f} ± {error:.3f}")


if __name__ == "__main__":
    sys.exit(main())
