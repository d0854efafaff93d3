"""AP and AF of a bundle whose gate is fitted again after each task of its stream.

    python -m benchmarks.gate.stages [--bundle FILE] [--seed 0] [--out FILE.json]

A task's entries are frozen once they are learned, so the bundle that a stream had after task i is today's without the
entries of later tasks, and with the gate that is fitted to what the stream had by then. All test questions of the
tasks learned by then and of the base are answered, in transformers.

Shapes: T tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.chat import same_answer
from benchmarks.continual.metrics import accuracy_matrix, average, average_forgetting
from benchmarks.continual.suites import Suite, load_suite
from benchmarks.gate.asking import fitted
from benchmarks.machine import describe_machine
from benchmarks.real.model import cache_folder
from inducekv_vllm.bundle import Bundle, read_bundle
from selector.backbone.bundled_model import BundledModel
from selector.backbone.gate_rule import routed_tasks
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from selector.gate.settings import DEFAULT_MISSES
from selector.runtime.files import replace_file
from selector.update.forget import without_entries
from server.demo import BUNDLE, CHECKPOINT

LONGEST_ANSWER = 20  # tokens


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Prints a row of the accuracy matrix after each task; returns what `--out` gets."""
    torch.set_num_threads(1)
    backbone = Backbone.load(CHECKPOINT)
    bundle = read_bundle(options.bundle, backbone=backbone.fingerprint)
    suite = load_suite("demo", cache_folder() / "gate-data" / "demo").ordered(bundle.metadata.gate_tasks)
    answers = Answers(Scorer(backbone))
    rows, base = [], []
    for learned in range(1, len(suite.tasks) + 1):
        stage = stage_of(bundle, suite, learned, backbone, options)
        rows.append([answers.accuracy(stage, task.test) for task in suite.tasks[:learned]])
        base.append(answers.accuracy(stage, suite.base.test))
        print(suite.tasks[learned - 1].name, *(f"{each:.3f}" for each in rows[-1]), f"base {base[-1]:.3f}", flush=True)
    matrix = accuracy_matrix(rows)
    result = {
        "benchmark": "gate_stages",
        "bundle": bundle.digest,
        "seed": options.seed,
        "tasks": [task.name for task in suite.tasks],
        "accuracy": rows,
        "base": base,
        "AP": average(matrix),
        "AF": average_forgetting(matrix),
        "machine": describe_machine(),
    }
    print(f"AP {result['AP']:.3f}  AF {result['AF']:.3f}  base {base[-1]:.3f}")
    return result


def stage_of(bundle: Bundle, suite: Suite, learned: int, backbone: Backbone, options: argparse.Namespace) -> Bundle:
    """The bundle as it was after the first `learned` tasks, with a gate that is fitted to them."""
    seen = suite.ordered([task.name for task in suite.tasks[:learned]])
    names = {task.name for task in seen.tasks}
    later = [row for row, entry in enumerate(bundle.metadata.entries) if entry.task not in names]
    return without_entries(bundle, later, fitted(backbone, seen, options.seed, DEFAULT_MISSES).gate)


class Answers:
    """Whether questions are answered right. A question that goes to the same task again has the same answer."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._right: dict[tuple[str, str | None], bool] = {}  # by question and the task whose entries it got

    def accuracy(self, stage: Bundle, questions: Sequence[Example]) -> float:
        model = BundledModel(self._scorer, stage)
        opened, prior = model.routing(questions)
        tasks = [task if is_open else None for task, is_open in zip(routed_tasks(stage, prior), opened, strict=True)]
        keys = [(question.source_digest, task) for question, task in zip(questions, tasks, strict=True)]
        new = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._right}
        texts = model.answers(list(new.values()), LONGEST_ANSWER)
        self._right |= {
            key: same_answer(text, question.answer) for (key, question), text in zip(new.items(), texts, strict=True)
        }
        return sum(self._right[key] for key in keys) / len(keys)


def main(arguments: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate.stages", description=__doc__, formatter_class=formatter
    )
    parser.add_argument(
        "--bundle", type=Path, default=BUNDLE, metavar="FILE", help="of the demo suite (default: the demo's)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the gates (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    result = run(options)
    if options.out:
        replace_file(options.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
