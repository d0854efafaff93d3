"""The content of the report's JSON file: shares are fractions, differences are paired over seeds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.research.continual import comparison
from benchmarks.research.continual.comparison import UNTOUCHED, Difference, Streams, final_accuracy, metric, rounded
from benchmarks.research.continual.report.names import ABLATIONS, RECIPES, RIVALS, is_ours, place, title
from benchmarks.research.continual.results import WHERE, Finished, read_json
from inducekv_vllm.errors import ConfigError
from selector.runtime.files import replace_file

AP, BASE = metric("AP"), metric("base_final")
KEPT = ("method", "budget", "seed", "settings", "complete", "accuracy", "base", "stored_bytes", "seconds", "metrics")
TRIED = ("activation", "rates_tried", "validation_accuracy")  # of a task's report
DIGITS = 4
COMMANDS = "commands.jsonl"

Content = dict[str, Any]


def read_folder(out: Path, model: Path | None = None) -> Content:
    """What the report of a run's folder holds, JSON values. Raises ConfigError: these are not runs of one stream."""
    finished = Finished.read(out, model)
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
        "finding": finding(streams),
        "missing": comparison.gaps(streams),
        "results": comparison.compare(streams),
        "differences": differences(streams),
        "diagnostics": [_read_diagnostic(path) for path in sorted((out / "diagnostics").glob("*.json"))],
        "commands": read_commands(out),
        "runs": [
            {**{name: _short(run[name]) for name in KEPT}, "anchor_bytes": int(run["anchor_bytes"][-1])}
            | _of_tasks(run)
            for run in streams.runs
        ],
    }


def read_file(path: Path) -> Content:
    """What a report's JSON file holds. Raises ConfigError: it is not such a file."""
    return read_json(path, "not the JSON file of a report", lambda c: c["benchmark"] == "continual" and c["runs"])


def ranking(streams: Streams, budget: int) -> list[str]:
    """Methods that have all seeds, the highest AP first; equal ones in the order of running."""
    complete = [method for method in streams.methods(budget) if streams.has_all_seeds(method, budget)]
    return sorted(complete, key=lambda method: -streams.mean(method, budget, AP).value)


def rivals(streams: Streams, budget: int) -> tuple[str, ...]:
    """Whom a recipe is compared with: those of `RIVALS`, and the best method that is not InduceKV's."""
    best = next((name for name in ranking(streams, budget) if not is_ours(name) and name != UNTOUCHED), None)
    return RIVALS if best in (None, *RIVALS) else (*RIVALS, best)


def finding(streams: Streams) -> str:
    """For each budget, which method has the highest AP, and which of InduceKV's losses to it are beyond the error."""
    sentences = []
    for budget in streams.budgets:
        if not (ranked := ranking(streams, budget)):
            continue
        best = ranked[0]
        ours = next((name for name in ranked if name in RECIPES), None)
        sentence = f"{budget} entries: {title(best)} has the highest AP"
        if ours not in (None, best):
            difference = streams.difference(ours, best, budget, AP)
            assert difference is not None  # both have all seeds
            within = {"open": ", within the error", "unknown": ", of a single seed"}.get(difference.verdict, "")
            sentence += f"; {title(ours)} is {-100 * difference.value:.1f} points behind{within}"
        sentences.append(sentence + ".")
    return " ".join(sentences) or "No stream is complete, so there is no result yet."


def differences(streams: Streams) -> list[dict[str, Any]]:
    """Recipes minus the untouched model and rivals, ablations minus what they change: paired, by budget."""
    pairs = [
        (budget, method, rival)
        for budget in streams.budgets
        for method, rival in (
            *((recipe, rival) for recipe in RECIPES for rival in (UNTOUCHED, *rivals(streams, budget))),
            *((name, against) for name, (_, against) in ABLATIONS.items()),
        )
    ]
    of_tasks = {task: final_accuracy(task) for task in streams.tasks}
    asked_base = all(comparison.has_base(run) for run in streams.runs)
    return [
        {
            "method": method,
            "against": rival,
            "budget": budget,
            "seeds": list(overall.seeds),
            "AP": _as_json(overall),
            "base_final": _as_json(streams.difference(method, rival, budget, BASE) if asked_base else None),
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


def _read_diagnostic(path: Path) -> dict[str, Any]:
    def is_diagnostic(content: Any) -> bool:
        return isinstance(content["diagnostic"], str) and isinstance(content["finding"], str)

    return read_json(path, "not what a diagnostic writes", is_diagnostic)


def record_command(out: Path, command: Sequence[str]) -> None:
    """Adds a command to OUT/commands.jsonl, once for each machine and versions that it ran with.

    Of paths outside the working directory only the last part is kept: where things lie is nobody's concern.
    """
    arguments = [Path(argument).name if Path(argument).is_absolute() else argument for argument in command]
    record = {"command": shlex.join(arguments), "machine": describe_machine()}
    if record not in (known := read_commands(out)):
        replace_file(out / COMMANDS, "".join(json.dumps(one) + "\n" for one in (*known, record)).encode())


def read_commands(out: Path) -> list[dict[str, Any]]:
    """Those that are on record. Raises ConfigError: the file does not parse."""
    path = out / COMMANDS
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except ValueError as error:
        raise ConfigError(f"{path}: not a list of commands: {error}") from error
