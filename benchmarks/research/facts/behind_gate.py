"""Facts behind the relevance gate of SmolLM2's real-text stream: which questions they answer.

    python -m benchmarks.research.facts.behind_gate [--seeds N] [--output FILE]

The gate is that after the stream's last task, and the training examples of its three tasks of facts are stored.
*Open*: facts count where the gate opens for their task. *Near*: they also count where it is closed and the question is
near enough, which is what a server does. *Words*: they count everywhere. Prints a table in Markdown with the shares of
questions that a fact is found for, and for the tasks' own questions, that the right one is. Decisions are computed in
transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from benchmarks.machine import describe_machine
from benchmarks.real.model import cache_folder, model_folder
from benchmarks.real.sources import Packages
from benchmarks.real.tasks import TASKS
from benchmarks.research.continual.suites import Suite, load_suite
from benchmarks.research.facts.families import ANOTHER
from benchmarks.research.gate.asking import AT_ONCE, fitted, order_of
from benchmarks.research.gate.protocol import EVERYDAY, LANGUAGES, NEAR, NEAR_SHARED, NOISE, other_questions
from inducekv_vllm.backbone.stored_facts import question_index
from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle import FactRecord, Gate
from inducekv_vllm.facts import QuestionIndex, Vectors, fit_threshold, words_of
from inducekv_vllm.gate import GateDecision
from selector.backbone.facts import fact_reader
from selector.backbone.gate_rule import decisions
from selector.backbone.model import Backbone
from selector.backbone.token_values import evidence_in, token_values
from selector.gate.encoding import encode_questions
from selector.gate.fitting_set import GateQuestion
from selector.gate.settings import DEFAULT_MISSES
from selector.gate.variations import text_of
from selector.update.facts import facts_of_examples

RESULTS: Final = Path(__file__).parents[2] / "results" / "facts_behind_gate.json"
STORED, TESTS, THINGS = 128, 48, 16  # training examples, test questions and things of a task
RULES: Final = ("open", "near", "words")
OWN, OTHER = "a stored fact, other wording", "another question about a stored thing"


@dataclass(frozen=True)
class TaskFacts:
    facts: Sequence[FactRecord]
    index: QuestionIndex
    threshold: float

    @classmethod
    def of(cls, facts: Sequence[FactRecord], vectors: Vectors) -> TaskFacts:
        index, numbers = question_index(facts, facts[0].task, vectors)
        return cls([facts[number] for number in numbers], index, fit_threshold(index))

    def find(self, text: str) -> tuple[float, str] | None:
        """The best score and its answer."""
        found, scores = self.index.search(words_of(text))
        return (scores[0], self.facts[found[0]].answer) if len(scores) and scores[0] >= self.threshold else None


def measured(backbone: Backbone, suite: Suite, seed: int) -> list[dict[str, Any]]:
    """The shares by kind of question and rule."""
    vectors = fact_reader(backbone).vectors
    stored = {
        task.name: TaskFacts.of(facts_of_examples(task.train[:STORED]), vectors)
        for task in suite.tasks
        if task.name in ANOTHER
    }
    gate = fitted(backbone, suite, seed, DEFAULT_MISSES).gate
    counts: dict[tuple[str, str], list[dict[str, bool]]] = {}
    for question, expected, decision in decided(backbone, gate, list(questions(suite, stored))):
        outcome = {}
        for rule in RULES:
            tasks = [task for task in stored if task in counting(rule, decision, gate)]
            found = [best for task in tasks if (best := stored[task].find(text_of(question.messages))) is not None]
            outcome[rule] = bool(found) and expected in (None, max(found)[1])
        counts.setdefault((question.task or "", question.kind), []).append(outcome)
    return [
        {"seed": seed, "task": task, "kind": kind, "questions": len(outcomes)}
        | {rule: sum(each[rule] for each in outcomes) / len(outcomes) for rule in RULES}
        for (task, kind), outcomes in counts.items()
    ]


def counting(rule: str, decision: GateDecision, gate: Gate) -> Sequence[str | None]:
    """The tasks whose facts count."""
    if rule == "words":
        return gate.tasks
    return decision.fact_tasks if rule == "near" else (decision.task,)


Expected = tuple[GateQuestion, str | None]  # and the answer of the fact that is asked for; None: any would be wrong


def questions(suite: Suite, stored: Mapping[str, TaskFacts]) -> Iterator[Expected]:
    """The tasks' own test questions, other questions about the same things, and everything else."""
    packages = Packages()
    for task in suite.tasks:
        if task.name not in stored:
            continue
        known = " ".join(fact.question for fact in stored[task.name].facts)
        for example in task.test[:TESTS]:
            yield GateQuestion(example.messages, (), task.name, OWN, "held_out"), example.answer
        things = dict.fromkeys(item.concepts[0] for item in TASKS[task.name].items(packages, Random(0))["train"])
        for thing in [each for each in things if each in known][:THINGS]:
            for wording in ANOTHER[task.name]:
                text = wording.format(thing)
                yield GateQuestion([message("user", text)], (), task.name, OTHER, "held_out"), None
    train = {task.name: task.train for task in suite.tasks}
    kinds = ("base", EVERYDAY, NOISE, LANGUAGES, NEAR, NEAR_SHARED)
    for question in other_questions("text", train, suite.base.test[:TESTS], Random("protocol")):
        if question.kind in kinds:
            yield question, None


def decided(
    backbone: Backbone, gate: Gate, asked: Sequence[Expected]
) -> Iterator[tuple[GateQuestion, str | None, GateDecision]]:
    for start in range(0, len(asked), AT_ONCE):
        part = asked[start : start + AT_ONCE]
        encoded = encode_questions(backbone, [question for question, _ in part])
        evidence = evidence_in(gate, token_values(backbone, encoded, gate.layers, gate.marks))
        for (question, expected), decision in zip(part, decisions(gate, evidence), strict=True):
            yield question, expected, decision


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means over seeds."""
    lines = ["| question | task | open | near | words |", "|---|---|---|---|---|"]
    for task, kind in dict.fromkeys((row["task"], row["kind"]) for row in rows):
        own = [row for row in rows if (row["task"], row["kind"]) == (task, kind)]
        cells = (f"{sum(row[rule] for row in own) / len(own):.3f}" for rule in RULES)
        lines.append(f"| {kind} | {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of the gate")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = Backbone.load(model_folder())
    suite = order_of(load_suite("real-text", cache_folder() / "gate-data" / "real-text"))
    rows = []
    for seed in range(args.seeds):
        rows += measured(backbone, suite, seed)
        print(f"seed {seed}", file=sys.stderr)
    print(table(rows))
    args.output.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
