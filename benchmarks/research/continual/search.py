"""The search of hyperparameters, the same for every method: all combinations of a few values, on validation questions.

    python -m benchmarks.research.continual search --method NAME ... --tasks 3 --grid KEY=V1,V2 ... \\
        --out DIR [--tuned FILE]

Each trial learns the first N tasks of the stream with the same budget and seeds. Its score is AP, the mean accuracy on
those tasks after the last of them, over their validation questions; the first of equal trials wins. The accuracy on
base questions is recorded and does not count. The trials' suite holds no test question at all.

Questions are answered in transformers, without a server. A search that was killed goes on when it is run again, since
its trials are streams. FILE (default DIR/tuned.json) gets every trial's scores and the winner's settings.

    DIR/search.json                               the configuration; a search with another one is refused
    DIR/trial-K/METHOD/budget-B/seed-S/           a trial's stream
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.research.continual.answering import OfflineAnswerer
from benchmarks.research.continual.comparison import learn_seconds
from benchmarks.research.continual.jobs import run_all
from benchmarks.research.continual.methods import Method, choose_methods
from benchmarks.research.continual.run import add_stream_options, check_places, model_facts, suite_of
from benchmarks.research.continual.stream import Run, claim, claim_stream, collect, run_stream, write_json
from benchmarks.research.continual.suites import Suite
from inducekv_vllm.errors import ConfigError, InduceKVError

CRITERION = "AP"
TUNED = "tuned.json"
Trials = tuple[tuple[str, ...], ...]  # of each: its settings as KEY=VALUE


def searched_suite(suite: Suite, tasks: int, train: int, questions: int, base_questions: int) -> Suite:
    """The first tasks, with validation questions as test questions; no others. Raises ConfigError: there are fewer."""
    if not 1 <= tasks <= len(suite.tasks):
        raise ConfigError(f"suite {suite.name!r} has {len(suite.tasks)} tasks, a search over {tasks} is not possible")
    first = replace(suite, tasks=suite.tasks[:tasks])
    return first.asked_about("validation").limited(train, questions, base_questions)


def grid_trials(grid: Sequence[str]) -> Trials:
    """All combinations of the values in "KEY=V1,V2". Raises ConfigError: one has another form, or repeats a key."""
    values: dict[str, list[str]] = {}
    for text in grid:
        key, equals, listed = text.partition("=")
        if not equals or not key or not all(listed.split(",")) or key in values:
            raise ConfigError(f"--grid needs KEY=V1,V2 with each KEY once, found {text!r}")
        values[key] = [f"{key}={value}" for value in dict.fromkeys(listed.split(","))]
    return tuple(itertools.product(*values.values()))


def methods_of_trials(options: argparse.Namespace) -> list[list[Method]]:
    """For each trial all methods with its settings. Raises ConfigError: a method, a setting or a grid is not one."""
    return [choose_methods(options.method, [*options.set, *settings]) for settings in grid_trials(options.grid)]


def score_trial(settings: Sequence[str], runs: Sequence[Run]) -> dict[str, Any]:
    """Means over the seeds of a trial's finished streams."""
    finished = [collect(run) for run in runs]
    return {
        "settings": list(settings),
        **{
            name: round(fmean(run["metrics"][name] for run in finished), 6)
            for name in (CRITERION, "base_final")
            if all(name in run["metrics"] for run in finished)
        },
        "seconds": round(fmean(map(learn_seconds, finished)), 1),
    }


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("search", help="search every method's settings the same way, on validation questions")
    add = parser.add_argument
    add_stream_options(parser)
    add("--method", nargs="+", required=True, metavar="NAME")
    add("--tasks", type=int, required=True, metavar="N", help="every trial learns the first N tasks of the stream")
    add("--grid", nargs="+", required=True, metavar="KEY=V1,V2", help="all combinations are tried")
    add("--budget", type=int, default=32)
    add("--tuned", type=Path, metavar="FILE", help=f"where the winners go (default: OUT/{TUNED})")
    add("--validation-limit", type=int, default=128, help="validation questions of each task (default 128)")
    add("--base-limit", type=int, default=135, help="base questions of the validation split (default 135)")
    parser.set_defaults(command=command)


def command(options: argparse.Namespace) -> int:
    """Ends in one JSON line. Raises InduceKVError: a method could not be run; the others are written."""
    trials, methods = grid_trials(options.grid), methods_of_trials(options)
    check_places(options)
    whole = suite_of(options).in_order(options.order)
    limits = (options.train_limit, options.validation_limit, options.base_limit)
    suite = searched_suite(whole, options.tasks, *limits)
    configuration = {
        "suite": suite.name,
        "data": suite.digest(),
        "tasks": [task.name for task in suite.tasks],
        "model": model_facts(options.model),
        "budget": options.budget,
        "seeds": options.seed,
        "split": "validation",
        "limits": dict(zip(("train", "validation", "base"), limits, strict=True)),
        "criterion": CRITERION,
        "grid": options.grid,
        "set": options.set,
    }
    claim(options.out, "search.json", configuration)
    runs = {
        name: [
            [
                Run(suite, of_trial[at], options.model, options.budget, s, options.out / f"trial-{n}")
                for s in options.seed
            ]
            for n, of_trial in enumerate(methods)
        ]
        for at, name in enumerate(options.method)
    }
    every = [run for of_method in runs.values() for trial in of_method for run in trial]
    for run in every:
        claim_stream(run)
    unfinished = [run for run in every if not run.finished]
    answerer = OfflineAnswerer(options.model, suite.new_tokens)
    stream = partial(run_stream, answerer=answerer, keep="none")
    outcomes = run_all(unfinished, stream, min(options.jobs, len(unfinished)), options.threads) if unfinished else ()
    refused = {run.method.name: str(outcome) for run, outcome in outcomes if isinstance(outcome, InduceKVError)}
    records = {}
    for name in options.method:
        if name not in refused:
            scored = [score_trial(settings, of_trial) for settings, of_trial in zip(trials, runs[name], strict=True)]
            best = max(scored, key=lambda trial: trial[CRITERION])  # the first of equal ones
            records[name] = {"settings": best["settings"], "trials": scored}
    result = {"benchmark": "search", "search": configuration, "machine": describe_machine(), "methods": records}
    path = options.tuned or options.out / TUNED
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    print(json.dumps(result))
    if refused:
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in refused.items()))
    return 0
