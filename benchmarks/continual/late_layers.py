r"""What memory of the generation loses if it acts in the gate's last layer and those after it alone.

    python -m benchmarks.continual.late_layers --suite demo --out FILE
    python -m benchmarks.continual.late_layers --suite real-text --model DIR \
        --steps 100 --train 128 --test 48 --out FILE

Such memory joins the forward pass that decides (`inducekv_vllm/workers/decisions.py`). Each task's entry is trained
four times from the same start: in all layers and in those, with both rates of the default recipe. FILE has what is
done, so the command goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.continual.suites import TaskData, load_suite
from benchmarks.machine import describe_machine
from selector.backbone.extraction import extract_keys
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.backbone.token_values import layers_of_gate
from selector.refined.candidates import LEARNING_RATES, active_from
from selector.refined.entries import initial_entries
from selector.refined.settings import RefinedSettings
from selector.refined.training import Training, TrainingProblem, log_prior
from selector.runtime.files import replace_file
from selector.update.inputs import TaskInputs
from server.demo import CHECKPOINT

BATCH = 32  # questions at a time, where nothing is trained


def main() -> int:
    args = parse_arguments()
    suite = load_suite(args.suite, args.out.with_name(f"data-{args.suite}")).limited(args.train, args.test, base=1)
    backbone = Backbone.load(args.model)
    layer = layers_of_gate(backbone.num_layers)[-1]
    settings = RefinedSettings(activation="generation", steps=args.steps, patience=None, precision="float32")
    results = json.loads(args.out.read_bytes())["results"] if args.out.exists() else []
    for task in suite.ordered(args.tasks).tasks if args.tasks else suite.tasks:
        arms = [(first, rate) for rate in LEARNING_RATES for first in (0, layer)]
        done = {(each["first_layer"], each["rate"]) for each in results if each["task"] == task.name}
        left = [arm for arm in arms if arm not in done]
        if not left:
            continue
        problem, test = problem_of(task, backbone, settings)
        for first_layer, rate in left:
            results.append(
                {"task": task.name, **trained(replace(problem, first_layer=first_layer), rate, settings, test)}
            )
            facts = {"benchmark": "late_layers", "suite": args.suite, "model": Path(args.model).name}
            facts |= {"steps": args.steps, "train_limit": args.train, "test_limit": args.test, "gate_layer": layer}
            result = {**facts, "num_layers": backbone.num_layers, "results": results, "machine": describe_machine()}
            replace_file(args.out, (json.dumps(result, indent=1) + "\n").encode())
    show(results, layer)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.continual.late_layers", description=__doc__)
    parser.add_argument("--suite", default="demo")
    parser.add_argument("--model", default=str(CHECKPOINT))
    parser.add_argument("--tasks", nargs="+", help="only these")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--train", type=int, default=256, help="training examples of each task")
    parser.add_argument("--test", type=int, default=256, help="test questions of each task")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def problem_of(task: TaskData, backbone: Backbone, settings: RefinedSettings) -> tuple[TrainingProblem, Questions]:
    """The training of a task's entry in all layers, and its test questions."""
    scorer = Scorer(backbone, batch_size=BATCH)
    training, validation, test = (
        active_from(scorer, Questions(split, extract_keys(backbone, split, batch_size=4, progress=False)), "generation")
        for split in (task.train, task.validation, task.test)
    )
    entries, records = initial_entries(
        backbone, TaskInputs(task.train, task.validation, (), None), settings, training.keys
    )
    return TrainingProblem(scorer, entries, training, log_prior(task.train, records), validation, False), test


def trained(problem: TrainingProblem, rate: float, settings: RefinedSettings, test: Questions) -> dict[str, Any]:
    with tiled_attention(problem.scorer.backbone):
        training = Training(problem, settings, rate)
        while training.step < settings.steps:
            training.take_step()
        memory, scorer = training.memory(), problem.scorer
        return {
            "first_layer": problem.first_layer,
            "rate": rate,
            "validation": scorer.accuracy(problem.validation, memory),
            "validation_nll": scorer.mean_loss(problem.validation, memory),
            "test": scorer.accuracy(test, memory),
        }


def show(results: list[dict[str, Any]], layer: int) -> None:
    """Test accuracy, with the rate of the smaller loss on validation."""
    table = Table("task", "all layers", f"from layer {layer}")
    for task in dict.fromkeys(each["task"] for each in results):
        cells = []
        for first_layer in (0, layer):
            arms = [each for each in results if (each["task"], each["first_layer"]) == (task, first_layer)]
            best = min(arms, key=lambda each: each["validation_nll"])
            cells.append(f"{best['test']:.3f} (rate {best['rate']:g})")
        table.add_row(task, *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())
