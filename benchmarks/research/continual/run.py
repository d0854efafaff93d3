"""A whole run: methods, budgets and seeds over one stream, in several processes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.research.continual.answering import Answerer, OfflineAnswerer
from benchmarks.research.continual.answering.http import HttpAnswerer
from benchmarks.research.continual.comparison import Streams, compare
from benchmarks.research.continual.jobs import run_all
from benchmarks.research.continual.methods import METHODS, Method, choose_methods
from benchmarks.research.continual.results import weights_digest
from benchmarks.research.continual.serving import Needs, own_servers
from benchmarks.research.continual.stream import Run, brief, claim, claim_stream, collect, log, run_stream, write_json
from benchmarks.research.continual.suites import (
    PUBLISHED,
    LoadOptions,
    Suite,
    load_suite,
    require_own_model,
    require_reader,
)
from benchmarks.research.continual.suites.suite import NEW_TOKENS
from benchmarks.research.published.scorers.scored import MODES
from inducekv_vllm.backbone.checkpoints import require_model_folder
from inducekv_vllm.errors import ConfigError, InduceKVError
from server.demo import CHECKPOINT

ALL_METHODS = "all"
OFFLINE, HTTP = "offline", "http"


@dataclass(frozen=True)
class RunOutcome:
    """Of all streams of a run."""

    finished: int  # streams, of this run or of an earlier one in the same folder
    total: int
    refused: Sequence[str]  # the streams that could not be run to their end, and why


def add_stream_options(parser: argparse.ArgumentParser) -> None:
    """What a run and a search have in common."""
    add = parser.add_argument
    of_suite = "FILE.toml: data on disk; MODULE:NAME: a function of the data folder; ucit, coin, ...: docs/suites.md"
    add("--suite", default="demo", metavar="NAME", help=f"demo, real-text, real-pictures; {of_suite}")
    add("--scoring", choices=MODES, default=MODES[0], help="of a published suite (default: published)")
    add("--images", type=Path, metavar="DIR", help="pictures of a published suite (default: a folder of DATA)")
    add("--allow-missing", action="store_true", help="leave out what a published suite lacks on disk")
    add("--model", type=Path, default=CHECKPOINT, help="(default: the demo model, for the demo suite)")
    add("--order", nargs="+", default=["default"], help="names of tasks in the order of learning, or random:SEED")
    add("--seed", nargs="+", type=int, default=[0])
    add("--out", type=Path, required=True, help="the folder of the results")
    add("--data", type=Path, help="the suite's data, made there if it is not (default: OUT/data)")
    add("--train-limit", type=int, default=512, help="training examples of each task (default 512)")
    setting = "a setting of the methods that have it, or of METHOD"
    add("--set", action="append", default=[], metavar="[METHOD.]KEY=VALUE", help=setting)
    add("--jobs", type=int, default=2, help="streams at a time (default 2)")
    add("--threads", type=int, default=1, help="of torch, for each stream (default 1)")


def run(options: argparse.Namespace) -> RunOutcome:
    """Prints the means over seeds as a JSON line; RESULTS, if named, also gets every stream. Raises InduceKVError."""
    methods, suite = check(options)
    configuration = configuration_of(options, suite)
    # Where the files of a run lie when it begins; they may move.
    where = {
        "suite": options.suite,
        "data": str((options.data or options.out / "data").absolute()),
        "model": str(options.model.absolute()),
        **({"images": str(options.images.absolute())} if options.images else {}),
    }
    claim(options.out, "run.json", configuration, where)
    runs = [
        Run(suite, method, options.model, budget, seed, options.out)
        for method in methods
        for budget in dict.fromkeys(options.budget)
        for seed in dict.fromkeys(options.seed)
    ]
    for stream in runs:
        claim_stream(stream)
    refused = run_unfinished([stream for stream in runs if not stream.finished], options)
    done = [collect(stream) for stream in runs if stream.finished]
    means = compare(Streams(done))
    results = {"benchmark": "continual", **configuration, "machine": describe_machine(), "results": means}
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.results, {**results, "runs": [brief(stream) for stream in done]})
    print(json.dumps(results))
    return RunOutcome(len(done), len(runs), refused)


def check(options: argparse.Namespace) -> tuple[list[Method], Suite]:
    """Raises InduceKVError: the options cannot be run."""
    methods = methods_of(options)
    if options.serve_args and options.answer == OFFLINE:
        raise ConfigError("--serve-args are for a run's own servers: leave out --answer offline")
    check_places(options)
    suite = suite_of(options).in_order(options.order)
    suite = (
        suite.with_validation()
        .asked_about(options.split)
        .limited(options.train_limit, options.test_limit, options.base_limit)
    )
    require_reader(suite, options.model)
    return methods, suite


def suite_of(options: argparse.Namespace) -> Suite:
    """Raises InduceKVError: see `load_suite`."""
    return load_suite(options.suite, options.data or options.out / "data", load_options(options))


def load_options(options: argparse.Namespace) -> LoadOptions:
    return LoadOptions(options.scoring, options.images, options.allow_missing, options.train_limit)


def check_places(options: argparse.Namespace) -> None:
    """Raises InduceKVError: the model is no checkpoint, or not the suite's own, or a number is out of its range."""
    require_own_model(options.suite, options.model)
    require_model_folder(options.model)
    budgets = options.budget if isinstance(options.budget, list) else [options.budget]
    if min([*budgets, options.jobs, options.threads]) < 1 or min(options.seed) < 0:
        raise ConfigError("budgets, jobs and threads must be positive, and seeds not negative")


def methods_of(options: argparse.Namespace) -> list[Method]:
    """With their settings. Raises ConfigError: a method or a setting is unknown."""
    return choose_methods(list(METHODS) if ALL_METHODS in options.method else options.method, options.set)


def model_facts(model: Path) -> dict[str, str]:
    return {"name": model.name, "weights": weights_digest(model)}


def configuration_of(options: argparse.Namespace, suite: Suite) -> dict[str, Any]:
    """The same for all results in one folder."""
    answer = {"by": options.answer, "server": None if options.answer == OFFLINE else "own"}
    if options.serve_args:
        answer["serve_args"] = options.serve_args
    return {
        "suite": suite.name,
        "data": suite.digest(),
        "order": [task.name for task in suite.tasks],
        "model": model_facts(options.model),
        **{name: getattr(options, name) for name in ("split", "train_limit", "test_limit", "base_limit")},
        "answer": answer,
        **({"scoring": options.scoring} if options.suite in PUBLISHED else {}),
        **({"allow_missing": True} if options.allow_missing else {}),
        **({} if suite.new_tokens == NEW_TOKENS else {"new_tokens": suite.new_tokens}),
    }


def run_unfinished(runs: Sequence[Run], options: argparse.Namespace) -> list[str]:
    """The streams that could not be run to their end, each with the reason."""
    if not runs:
        return []
    refused = []
    with answering(runs, options) as answerer:
        run_one = partial(run_stream, answerer=answerer, keep=options.keep_states)
        for run, outcome in run_all(runs, run_one, min(options.jobs, len(runs)), options.threads):
            if isinstance(outcome, InduceKVError):
                refused.append(f"{run.title}: {outcome}")
                log(refused[-1])
    return refused


@contextmanager
def answering(runs: Sequence[Run], options: argparse.Namespace) -> Iterator[Answerer]:
    """Answers come from this process, or from servers that end with the context."""
    if options.answer == OFFLINE:
        yield OfflineAnswerer(options.model, runs[0].suite.new_tokens)
        return
    methods = list({run.method.name: run.method for run in runs}.values())
    needs = Needs(options.model, runs[0].suite, methods, max(run.budget for run in runs), options.jobs)
    log(f"starting inducekv-serve; its log is in {options.out}")
    with own_servers(needs, options.out, options.serve_args) as endpoints:
        yield HttpAnswerer(options.model, endpoints, runs[0].suite.new_tokens)
