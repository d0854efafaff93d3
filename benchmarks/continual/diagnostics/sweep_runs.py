"""The runs of a sweep: one short stream for each value of a setting, see `comparison.Sweeps`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.continual.answering import OfflineAnswerer
from benchmarks.continual.diagnostics.statistics import require_same
from benchmarks.continual.methods import Method, choose_methods
from benchmarks.continual.results import WHERE, Finished, FinishedRun
from benchmarks.continual.run import OFFLINE
from benchmarks.continual.stream import Run, claim, run_stream
from inducekv_vllm.errors import ConfigError

LETTERS = {"m": "payload_tokens", "J": "inner_steps", "A": "anchors_per_task"}
SHORT = 3  # tasks


def run_sweeps(finished: Finished, folder: Path, budget: int, options: Namespace) -> None:
    """Every value of every setting, for each seed, in a folder of its own; nothing is run twice."""
    points = [point for setting in options.setting for point in sweep_points(options.method, setting, options.set)]
    if not points:
        return
    suite = finished.suite.ordered(options.tasks or finished.configuration["order"][:SHORT])
    answerer = OfflineAnswerer(finished.model)
    configuration = {name: value for name, value in finished.configuration.items() if name != WHERE} | {
        "order": [task.name for task in suite.tasks],
        "data": suite.digest(),
        "answer": {"by": OFFLINE, "server": None},
    }
    for name, method in points:
        claim(folder / name, "run.json", configuration, where=finished.configuration.get(WHERE))
        for seed in options.seed or [0]:
            run_stream(Run(suite, method, finished.model, budget, seed, folder / name), answerer, keep="none")


def sweep_points(method: str, setting: str, fixed: Sequence[str]) -> list[tuple[str, Method]]:
    """Each value's folder name and method, of a setting "NAME=V1,V2,..." beside `fixed` ones. Raises ConfigError."""
    name, equals, values = setting.partition("=")
    if not equals or not all(values.split(",")):
        raise ConfigError(f"a sweep must read NAME=VALUE,VALUE,..., found {setting!r}")
    name = LETTERS.get(name, name)
    texts = [f"{name}={value.strip()}" for value in values.split(",")]
    return [(text, choose_methods([method], [*fixed, text])[0]) for text in texts]


def finished_sweeps(
    folder: Path, method: str, budget: int, seeds: Sequence[int] | None
) -> dict[str, list[FinishedRun]]:
    """A method's finished runs under `folder` by setting. Raises ConfigError: there are none, or of several streams."""
    sweeps = [Finished.read(path.parent) for path in sorted(folder.glob("*=*/run.json"))]
    by_setting: dict[str, list[FinishedRun]] = {}
    for sweep in sweeps:
        runs = [run for run in sweep.complete if (run.method, run.budget) == (method, budget)]
        runs = [run for run in runs if seeds is None or run.seed in seeds]
        if runs:
            which = f"{sweeps[0].out} and {sweep.out}"
            require_same(sweeps[0].configuration, sweep.configuration, which, but="setting")
            by_setting.setdefault(sweep.out.name.partition("=")[0], []).extend(runs)
    if not by_setting:
        raise ConfigError(f"{folder}: there are no finished sweeps of {method} with budget {budget}: give --setting")
    return by_setting
