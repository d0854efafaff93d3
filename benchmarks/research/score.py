"""Scores predictions that anyone made for a published suite, as its script does and as it should; no model is needed.

    python -m benchmarks.research.score --suite coin --task Grounding --data DIR --mode both predictions.jsonl

Predictions are JSON lines with `question_id` and `text`. Prints a table, what the published script does that nobody
would expect, and one JSON line last. docs/suites.md has the layouts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.research.published.rows import read_predictions
from benchmarks.research.published.scorers import boxes
from benchmarks.research.published.scorers.scored import MODES, Mode, Prediction, Question, Rule, Score
from benchmarks.research.published.suites import SUITES, published_suite
from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.runtime.files import replace_file

Scores = Mapping[Mode, Score | str]  # a text: why the published script stops


def score(
    rule: Rule, modes: Sequence[Mode], questions: Sequence[Question], predictions: Sequence[Prediction]
) -> Scores:
    """Raises TaskDataError: a prediction is of no question, or, corrected, of one that has another."""
    known = {question.id for question in questions}
    if unknown := [prediction.id for prediction in predictions if prediction.id not in known]:
        raise TaskDataError(f"{len(unknown)} predictions are of no question, the first of {unknown[0]!r}")
    repeated = [name for name, count in Counter(prediction.id for prediction in predictions).items() if count > 1]
    if repeated and "corrected" in modes:
        raise TaskDataError(
            f"{len(repeated)} questions have more than one prediction, the first is {repeated[0]!r}: only --mode "
            "published scores them"
        )
    found: dict[Mode, Score | str] = {}
    for mode in modes:
        try:
            found[mode] = rule.score(mode, questions, predictions)
        except TaskDataError as error:
            if mode == "corrected" or len(modes) == 1:
                raise
            found[mode] = str(error)
    return found


def outcome(scores: Scores) -> dict[str, Any]:
    return {mode: {"stops": each} if isinstance(each, str) else dict(each.metrics) for mode, each in scores.items()}


def details(scores: Scores, questions: Sequence[Question], predictions: Sequence[Prediction]) -> str:
    """A JSON line a question: its answers, its prediction, and its score in each mode; null: it does not count."""
    texts = {prediction.id: prediction.text for prediction in predictions}
    lines = []
    for number, question in enumerate(questions):
        values = {mode: None if isinstance(each, str) else each.questions[number] for mode, each in scores.items()}
        line = {"question_id": question.id, "prediction": texts.get(question.id), "answers": question.answers, **values}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def show(console: Console, rule: Rule, scores: Scores, missing: Sequence[str], questions: int) -> None:
    found = {mode: each for mode, each in scores.items() if isinstance(each, Score)}
    table = Table("", *scores)
    names = dict.fromkeys(name for each in found.values() for name in each.metrics)
    for name in names:
        cells = [found[mode].metrics.get(name) if mode in found else None for mode in scores]
        table.add_row(name, *["-" if value is None else f"{value:.2f}" for value in cells])
    table.add_row("counted", *[str(found[mode].counted) if mode in found else "-" for mode in scores])
    console.print(table)
    first = f", the first is {missing[0]}" if missing else ""
    console.print(f"{questions} questions, {len(missing)} without a prediction{first}", markup=False, highlight=False)
    for mode, each in scores.items():
        if isinstance(each, str):
            console.print(f"the {mode} script stops: {each}", markup=False)
    for title, lines in (("As published:", rule.slips), ("Corrected:", rule.differences)):
        console.print(title)
        for line in lines:
            console.print(f"  - {line}", markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("predictions", type=Path, help="JSON lines with question_id and text")
    add("--suite", required=True, choices=SUITES)
    add("--task", required=True, help="a task of the suite, or the name of its folder")
    add("--data", type=Path, required=True, metavar="DIR", help="the folder with the suite's files")
    add("--mode", choices=(*MODES, "both"), default="both")
    add("--publisher", help="whose script, where there are several (default: the suite's own)")
    add("--boxes", choices=("padded", "picture"), default="padded", help="what predicted boxes are fractions of")
    add("--details", type=Path, metavar="FILE", help="where to write a JSON line for each question")
    options = parser.parse_args(arguments)
    try:
        suite = published_suite(options.suite)
        task = suite.task(options.task)
        rule = task.rule(options.publisher)
        if options.boxes == "picture":
            if rule is not boxes.GROUNDING:
                raise ConfigError(f"--boxes picture is for CoIN's Grounding, not for {task.name}")
            rule = boxes.GROUNDING_IN_PICTURE
        questions = task.questions(suite.files(task, options.data))
        predictions = read_predictions(options.predictions, task.name)
        modes = MODES if options.mode == "both" else (options.mode,)
        scores = score(rule, modes, questions, predictions)
        if options.details:
            replace_file(options.details, details(scores, questions, predictions).encode())
    except (ConfigError, TaskDataError) as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        print(
            f"{task.name} of {suite.name} is scored with the package {package}: pip install '.[suites]'",
            file=sys.stderr,
        )
        return 2
    answered = {prediction.id for prediction in predictions}
    missing = [question.id for question in questions if question.id not in answered]
    show(Console(width=120), rule, scores, missing, len(questions))
    line = {"suite": suite.name, "task": task.name, "questions": len(questions), "missing": len(missing)}
    print(json.dumps({**line, **outcome(scores)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
