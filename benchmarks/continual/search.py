"""The search of hyperparameters, the same for every method: a few trials each, scored on validation questions alone.

    python -m benchmarks.continual search --method all --tasks 3 --seed 0 --out DIR [--tuned FILE]

Each of a method's `trials` learns the first N tasks of the stream with the same budget and seeds. Its score is AP, the
mean accuracy on those tasks after the last of them, over their validation questions; the first of equal trials wins.
The accuracy on base questions is recorded and does not count. The trials' suite holds no test question at all.
`--grid KEY=V1,V2` tries all combinations of such values in place of the methods' own trials.

Questions are answered in transformers, without a server. A search that was killed goes on when it is run again, since
its trials are streams; several searches of one configuration may share DIR and FILE (default DIR/tuned.json).

    DIR/search.json                               the configuration; a search with another one is refused
    DIR/trial-K/METHOD/budget-B/seed-S/           a trial's stream
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.continual.answering import Answerer, OfflineAnswerer
from benchmarks.continual.comparison import learn_seconds
from benchmarks.continual.jobs import run_all
from benchmarks.continual.methods import METHODS, Method, choose_methods, parsed_value
from benchmarks.continual.methods.method import Trials
from benchmarks.continual.results import weights_digest
from benchmarks.continual.run import ALL_METHODS, add_stream_options
from benchmarks.continual.stream import Run, claim, claim_stream, collect, run_stream
from benchmarks.continual.suites import Suite, load_suite, require_own_model, require_reader
from benchmarks.continual.tuned import TUNED, Settings, apply_settings, trials_of, unsearched_digest, write_tuned
from benchmarks.machine import describe_machine
from inducekv_vllm.backbone.checkpoints import require_model_folder
from inducekv_vllm.errors import ConfigError, InduceKVError

CRITERION = "AP"


@dataclass(frozen=True)
class Search:
    """The same for every trial of every method."""

    trials: Mapping[str, Trials]  # by method
    suite: Suite  # as `searched_suite` makes it
    model: Path
    budget: int
    seeds: tuple[int, ...]
    folder: Path


def searched_suite(suite: Suite, tasks: int, train: int, questions: int, base_questions: int) -> Suite:
    """The first tasks, with validation questions as test questions; no others. Raises ConfigError: there are fewer."""
    if not 1 <= tasks <= len(suite.tasks):
        raise ConfigError(f"suite {suite.name!r} has {len(suite.tasks)} tasks, a search over {tasks} is not possible")
    first = replace(suite, tasks=suite.tasks[:tasks])
    return first.asked_about("validation").limited(train, questions, base_questions)


def grid_trials(grid: Sequence[str]) -> Trials:
    """All combinations of the values in "KEY=V1,V2", each value in JSON or as it stands.

    Raises ConfigError: one of `grid` has another form, or repeats a key.
    """
    values: dict[str, list[Any]] = {}
    for text in grid:
        key, equals, listed = text.partition("=")
        if not equals or not key or not all(listed.split(",")) or key in values:
            raise ConfigError(f"--grid needs KEY=V1,V2 with each KEY once, found {text!r}")
        values[key] = [parsed_value(value) for value in listed.split(",")]
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))


def require_equal_trials(trials: Mapping[str, Trials]) -> int:
    """The number of trials of each method that has any, or 0. Raises ConfigError: they differ, or one is repeated."""
    counts = {name: len(tried) for name, tried in trials.items() if tried}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ConfigError(f"every method must have the same number of trials, found {listed}")
    for name, tried in trials.items():
        for number, settings in enumerate(tried):
            if settings in tried[:number]:
                raise ConfigError(f"{name}: the trial {dict(settings)} occurs more than once")
    return next(iter(counts.values()), 0)


def trial_runs(method: Method, shared: Search) -> list[list[Run]]:
    """The streams of each trial, one for each seed."""
    tried = shared.trials[method.name]
    trials = [(apply_settings(method, settings), f"trial-{n}") for n, settings in enumerate(tried)]
    return [
        [Run(shared.suite, trial, shared.model, shared.budget, seed, shared.folder / name) for seed in shared.seeds]
        for trial, name in trials
    ]


def run_trials(
    methods: Sequence[Method], shared: Search, answerer: Answerer, jobs: int = 1, threads: int = 1
) -> dict[str, str]:
    """Runs all unfinished streams, several at a time; returns the methods that could not be run, with the reasons."""
    runs = [run for method in methods for trial in trial_runs(method, shared) for run in trial]
    for run in runs:
        claim_stream(run)
    stream = partial(run_stream, answerer=answerer, keep="none")
    unfinished = [run for run in runs if not run.finished]
    outcomes = run_all(unfinished, stream, min(jobs, len(unfinished)), threads) if unfinished else ()
    return {run.method.name: str(outcome) for run, outcome in outcomes if isinstance(outcome, InduceKVError)}


def score_method(method: Method, shared: Search) -> dict[str, Any]:
    """One method's record in the file, from its finished trials: the winner's settings, and every trial's scores."""
    trials = [
        score_trial(settings, runs)
        for settings, runs in zip(shared.trials[method.name], trial_runs(method, shared), strict=True)
    ]
    best = max(trials, key=lambda trial: trial[CRITERION]) if trials else {"settings": {}}  # the first of equal ones
    searched = sorted({name for settings in shared.trials[method.name] for name in settings})
    return {
        "settings": best["settings"],
        "trials": trials,
        "searched": searched,
        "unsearched": unsearched_digest(method, searched),
    }


def score_trial(settings: Settings, runs: Sequence[Run]) -> dict[str, Any]:
    """Means over the seeds of a trial's finished streams."""
    finished = [collect(run) for run in runs]
    return {
        "settings": dict(settings),
        **{name: round(fmean(run["metrics"][name] for run in finished), 6) for name in (CRITERION, "base_final")},
        "seconds": round(fmean(map(learn_seconds, finished)), 1),
    }


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("search", help="search every method's settings the same way, on validation questions")
    add = parser.add_argument
    add_stream_options(parser)
    add("--method", nargs="+", required=True, metavar="NAME", help=f"names, or {ALL_METHODS}")
    add("--tasks", type=int, required=True, metavar="N", help="every trial learns the first N tasks of the stream")
    add("--grid", nargs="+", default=[], metavar="KEY=V1,V2", help="try all these (default: each method's own trials)")
    add("--budget", type=int, default=32)
    add("--tuned", type=Path, metavar="FILE", help=f"where the winners go (default: OUT/{TUNED})")
    add("--validation-limit", type=int, default=128, help="validation questions of each task (default 128)")
    add("--base-limit", type=int, default=135, help="base questions of the validation split (default 135)")
    parser.set_defaults(command=command)


def trials_to_make(options: argparse.Namespace) -> tuple[list[Method], dict[str, Trials]]:
    """The methods, and the trials of each. Raises ConfigError: a method, a setting or a grid is not one."""
    methods = choose_methods([*METHODS] if ALL_METHODS in options.method else options.method, options.set)
    return methods, {m.name: grid_trials(options.grid) if options.grid else trials_of(m) for m in methods}


def command(options: argparse.Namespace) -> int:
    """Ends in one JSON line. Raises InduceKVError: a method could not be run; the others are written."""
    methods, trials = trials_to_make(options)
    number = require_equal_trials(trials)
    require_own_model(options.suite, options.model)
    require_model_folder(options.model)
    if min([options.budget, options.jobs, options.threads]) < 1 or min(options.seed) < 0:
        raise ConfigError("the budget, jobs and threads must be positive, and seeds not negative")
    whole = load_suite(options.suite, options.data or options.out / "data").in_order(options.order)
    limits = (options.train_limit, options.validation_limit, options.base_limit)
    suite = searched_suite(whole, options.tasks, *limits)
    require_reader(suite, options.model)
    configuration = {
        "suite": suite.name,
        "data": suite.digest(),
        "tasks": [task.name for task in suite.tasks],
        "model": {"name": options.model.name, "weights": weights_digest(options.model)},
        "budget": options.budget,
        "seeds": options.seed,
        "split": "validation",
        "limits": dict(zip(("train", "validation", "base"), limits, strict=True)),
        "criterion": CRITERION,
        "trials": number,
        "set": options.set,
    }
    claim(options.out, "search.json", configuration)
    shared = Search(trials, suite, options.model, options.budget, tuple(options.seed), options.out)
    refused = run_trials(methods, shared, OfflineAnswerer(options.model), options.jobs, options.threads)
    records = {method.name: score_method(method, shared) for method in methods if method.name not in refused}
    write_tuned(options.tuned or options.out / TUNED, configuration, records)
    print(json.dumps({"benchmark": "search", **configuration, "machine": describe_machine(), "methods": records}))
    if refused:
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in refused.items()))
    return 0
