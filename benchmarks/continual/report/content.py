"""The content of the report's JSON file: shares are fractions, differences are paired over seeds."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.continual import comparison, metrics
from benchmarks.continual.comparison import UNTOUCHED, Collected, Difference, Streams, final_accuracy, rounded
from benchmarks.continual.footprint_table import conversions, mean_picture_bytes
from benchmarks.continual.report.commands import read_commands
from benchmarks.continual.report.names import RECIPES, RIVALS, ablations, place
from benchmarks.continual.report.ranking import AP, BASE, rivals, summary, verdict
from benchmarks.continual.results import WHERE, Finished, read_json
from benchmarks.continual.suites import TaskData
from inducekv_vllm.backbone.footprint import read_config, text_geometry
from inducekv_vllm.errors import ConfigError, TaskDataError

KEPT = ("method", "budget", "seed", "settings", "complete", "accuracy", "base", "stored_bytes", "seconds", "metrics")
TRIED = ("activation", "rates_tried")  # of a task's report
DIGITS = 4
ANSWERS_OF = (UNTOUCHED, *RECIPES, *RIVALS)  # methods whose answers to an example question are shown

Content = dict[str, Any]


def read_folder(
    out: Path, model: Path | None = None, data: Path | None = None, tuned: Mapping[str, Any] | None = None
) -> Content:
    """What the report of a run's folder holds, JSON values. Raises ConfigError: these are not runs of one stream."""
    finished = Finished.read(out, model, data)
    runs = sorted((*finished.complete, *finished.unfinished), key=lambda run: place(run.method))
    if not runs:
        raise ConfigError(f"{out}: no task of any stream is done yet")
    expected = finished.configuration["model"]["name"]
    if finished.model.name != expected:
        raise ConfigError(f"{out} is of the model {expected!r}: name its folder with --model, found {finished.model}")
    streams = Streams([run.matrix for run in runs])
    return {
        "benchmark": "continual",
        **{key: value for key, value in finished.configuration.items() if key != WHERE},
        "verdict": verdict(streams),
        "finding": summary(streams),
        "missing": comparison.gaps(streams),
        "results": comparison.compare(streams),
        "differences": _differences(streams),
        "diagnostics": [_read_diagnostic(path) for path in sorted((out / "diagnostics").glob("*.json"))],
        "commands": read_commands(out),
        "runs": [
            {**{name: _short(run[name]) for name in KEPT}, "anchor_bytes": int(run["anchor_bytes"][-1])}
            | _of_tasks(run)
            for run in streams.runs
        ],
        **_examples_and_footprint(finished, streams.budgets),
        "tuned": None if tuned is None else {**tuned},
    }


def read_file(path: Path) -> Content:
    """What a report's JSON file holds. Raises ConfigError: it is not such a file."""
    return read_json(path, "not the JSON file of a report", lambda c: c["benchmark"] == "continual" and c["runs"])


def streams_of(content: Content) -> Streams:
    """The runs of a report's JSON file."""
    questions = {example["task"]: example["questions"] for example in content["examples"]}
    return Streams([_exact({**run, "order": content["order"]}, questions) for run in content["runs"]])


def _exact(run: Collected, questions: Mapping[str, int]) -> Collected:
    """A run with the digits that its accuracies lost in the file: each is a count of the `questions` of its task.

    Without them the page would show other last digits than the file's own means.
    """
    if not questions:
        return run
    *counts, base_count = questions.values()  # in the order of learning
    accuracy = [[round(a * n) / n for a, n in zip(row, counts, strict=False)] for row in run["accuracy"]]
    base = [round(a * base_count) / base_count for a in run["base"]]
    scores = metrics.summary(metrics.accuracy_matrix(accuracy), base)
    return {**run, "accuracy": accuracy, "base": base, "metrics": scores}


def _differences(streams: Streams) -> list[dict[str, Any]]:
    """Recipes minus the untouched model and rivals, ablations minus what they change: paired, by budget."""
    pairs = [
        (budget, method, rival)
        for budget in streams.budgets
        for recipe in RECIPES
        for method, rival in (
            *((recipe, rival) for rival in (UNTOUCHED, *rivals(streams, budget))),
            *((name, ablation.against) for name, ablation in ablations(streams.methods(budget), recipe).items()),
        )
    ]
    of_tasks = {task: final_accuracy(task) for task in streams.tasks}
    return [
        {
            "method": method,
            "against": rival,
            "budget": budget,
            "seeds": list(overall.seeds),
            "AP": _as_json(overall),
            "base_final": _as_json(streams.difference(method, rival, budget, BASE)),
            "tasks": {
                task: _as_json(streams.difference(method, rival, budget, score)) for task, score in of_tasks.items()
            },
        }
        for budget, method, rival in pairs
        if (overall := streams.difference(method, rival, budget, AP)) is not None
    ]


def _as_json(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    margin = None if difference.margin is None else round(difference.margin, DIGITS)
    return {**rounded(difference, DIGITS), "margin": margin, "verdict": difference.verdict}


def _of_tasks(run: Mapping[str, Any]) -> Content:
    """The trainings among which a method chose, and a memory's entries, after each task; absent if there are none."""
    reports = run.get("reports", ())
    tried = [{key: _short(report[key]) for key in TRIED if key in report} for report in reports]
    compositions = [report["composition"] for report in reports if "composition" in report]
    entries = [each.get("after", each) for each in compositions]  # of a selection also those before it
    return ({"tried": tried} if any(tried) else {}) | ({"composition": entries} if entries else {})


def _short(value: Any) -> Any:
    """With few digits."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, list):
        return [_short(item) for item in value]
    return {key: _short(item) for key, item in value.items()} if isinstance(value, dict) else value


def _examples_and_footprint(finished: Finished, budgets: Sequence[int]) -> Content:
    """A question of each task, the base last, or why there is none; and what the bytes of a memory would buy."""
    examples: list[dict[str, Any]] = []
    missing = picture_bytes = None
    try:
        tasks = finished.suite.tasks
        picture_bytes = mean_picture_bytes([example for task in tasks for example in task.train])
        first = {run.method: run for run in reversed(finished.complete) if run.method in ANSWERS_OF}
        answers = {name: first[name].predictions() for name in ANSWERS_OF if name in first}
        examples = [_example(task, answers) for task in (*tasks, finished.suite.base)]
    except (ConfigError, TaskDataError) as error:
        missing = str(error)
    geometry = text_geometry(read_config(finished.model / "config.json"))
    return {
        "examples": examples,
        "examples_missing": missing,
        "footprint": [asdict(row) for row in conversions(geometry, budgets, picture_bytes=picture_bytes)],
        "picture_bytes": picture_bytes,
    }


def _example(task: TaskData, predictions: Mapping[str, Mapping[tuple[str, str], Any]]) -> dict[str, Any]:
    """A task's first question with its picture (PNG, base64), and the answers after the last task by method."""
    example = task.test[0]
    picture = None
    for image in example.load_images()[:1]:
        data = io.BytesIO()
        image.save(data, "PNG")
        picture = base64.b64encode(data.getvalue()).decode()
    key, parts = (task.name, example.id), example.messages[-1]["content"]
    return {
        "task": task.name,
        "questions": len(task.test),
        "text": " ".join(part["text"] for part in parts if part["type"] == "text"),
        "expected": example.answer,
        "picture": picture,
        "answers": {method: lines[key].answer for method, lines in predictions.items() if key in lines},
    }


def _read_diagnostic(path: Path) -> dict[str, Any]:
    def is_diagnostic(content: Any) -> bool:
        return isinstance(content["diagnostic"], str) and isinstance(content["finding"], str)

    return read_json(path, "not what a diagnostic writes", is_diagnostic)
