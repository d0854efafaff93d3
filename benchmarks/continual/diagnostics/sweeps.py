"""How the scores of a method change with one setting at a time, on a short stream.

    python -m benchmarks.continual.diagnostics sweeps --out DIR --method paper --budget 8 \\
        --setting beta=0.1,0.3,0.5,1 --setting gamma=0,0.05,0.1,0.3 --setting m=4,8,16 --setting J=1,5,10,20 \\
        [--tasks guild field beside] [--seed 0 1 2] [--set KEY=VALUE ...]

DIR is the folder of a run, whose suite, model and limits are taken. Each value has a run of its own in
DIR/diagnostics/sweeps/NAME=VALUE, made by `benchmarks.continual.stream`, so a command that was killed goes on where it
was. Then all finished sweeps of the method and budget that lie there are read, those of earlier commands too; without
--setting nothing is run. Questions are answered in this process. A setting has the name of the method's field, or one
of the paper's letters: m payload tokens an entry, J inner steps, A anchors a task.

Source: the paper's section "Hyperparameter Sensitivity".
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.answering import Answerer, OfflineAnswerer
from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.sameness import require_same
from benchmarks.continual.diagnostics.spread import spread
from benchmarks.continual.methods import METHODS, Method, choose_methods
from benchmarks.continual.results import WHERE, Finished, FinishedRun
from benchmarks.continual.run import OFFLINE, tell
from benchmarks.continual.stream import Run, claim, run_stream
from benchmarks.continual.suites import Suite
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Hyperparameter Sensitivity"'
LETTERS = {"m": "payload_tokens", "J": "inner_steps", "A": "anchors_per_task"}
SCORES = ("AP", "AF", "base_final")
SHORT = 3  # tasks


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--setting", action="append", default=[], metavar="NAME=V1,V2,...", help="run the stream with each value")
    add("--tasks", nargs="+", help=f"the short stream (default: the run's first {SHORT} tasks)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting, the same in all runs")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    """
    Raises:
        ConfigError: no such method, setting or task; nothing to read; sweeps that differ in more than their setting.
    """
    budget = options.budget if options.budget is not None else finished.runs(options.method)[0].budget
    folder = finished.out / "diagnostics" / "sweeps"
    sweep = [point for setting in options.setting for point in points(options.method, setting, options.set)]
    suite = finished.suite.ordered(options.tasks or finished.configuration["order"][:SHORT]) if sweep else None
    for name, method in sweep:
        assert suite is not None
        run_point(finished, suite, folder / name, method, budget, options.seed or [0], OfflineAnswerer(finished.model))
    return read(folder, options.method, budget, options.seed)


def points(method: str, setting: str, fixed: Sequence[str]) -> list[tuple[str, Method]]:
    """Each value's folder name, and the method with it.

    Args:
        setting: "NAME=V1,V2,...".
        fixed: other settings, "KEY=VALUE".

    Raises:
        ConfigError: it has another form, or the method has no such setting.
    """
    name, given, values = setting.partition("=")
    if not given or not all(values.split(",")):
        raise ConfigError(f"a sweep must read NAME=VALUE,VALUE,..., found {setting!r}")
    name = LETTERS.get(name, name)
    texts = [f"{name}={value.strip()}" for value in values.split(",")]
    return [(text, choose_methods([method], [*fixed, text])[0]) for text in texts]


def run_point(
    finished: Finished,
    suite: Suite,
    folder: Path,
    method: Method,
    budget: int,
    seeds: Sequence[int],
    answerer: Answerer,
) -> None:
    """The stream with one value, for each seed; what is there is not made again.

    Raises:
        ConfigError: the folder belongs to another stream or other settings.
    """
    known = {name: value for name, value in finished.configuration.items() if name != WHERE}
    known |= {"order": [task.name for task in suite.tasks], "data": suite.digest()}
    known |= {"answer": {"by": OFFLINE, "server": None}}
    claim(folder, "run.json", known, where=finished.configuration.get(WHERE))
    for seed in seeds:
        run_stream(Run(suite, method, finished.model, budget, seed, folder), answerer, tell, keep="none")


def read(folder: Path, method: str, budget: int, seeds: Sequence[int] | None) -> dict[str, Any]:
    """All finished sweeps of a method and budget under `folder`."""
    swept = [Finished.read(path.parent) for path in sorted(folder.glob("*=*/run.json"))]
    runs: dict[str, list[FinishedRun]] = {}
    for one in swept:
        found = [run for run in one.complete if (run.method, run.budget) == (method, budget)]
        found = [run for run in found if seeds is None or run.seed in seeds]
        if found:
            require_same(swept[0].configuration, one.configuration, f"{swept[0].out} and {one.out}", but="setting")
            runs.setdefault(one.out.name.partition("=")[0], []).extend(found)
    if not runs:
        raise ConfigError(f"{folder}: there are no finished sweeps of {method} with budget {budget}: give --setting")
    settings = {name: curve(name, of) for name, of in runs.items()}
    tasks = next(iter(runs.values()))[0].order
    return {
        "diagnostic": "sweeps",
        "source": SOURCE,
        "says": _says(method, budget, tasks, settings),
        "method": method,
        "budget": budget,
        "tasks": tasks,
        "defaults": {name: getattr(METHODS.get(method), name, None) for name in settings},
        "settings": settings,
    }


def curve(name: str, runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """One point for each value of a setting, rising: means and deviations of the scores over seeds.

    Raises:
        ConfigError: the runs differ in other settings.
    """
    by_value: dict[Any, list[FinishedRun]] = {}
    for run in runs:
        require_same(runs[0].matrix["settings"], run.matrix["settings"], f"{runs[0].folder} and {run.folder}", but=name)
        by_value.setdefault(run.matrix["settings"][name], []).append(run)
    return [
        {
            "value": value,
            "seeds": [run.seed for run in of],
            **{score: spread([run.matrix["metrics"][score] for run in of]) for score in SCORES},
        }
        for value, of in sorted(by_value.items())
    ]


def plot(found: dict[str, Any]) -> Figure:
    settings = found["settings"]
    columns = min(3, len(settings))
    rows = -(-len(settings) // columns)
    figure = blank(0.5 + 2.4 * rows)
    for number, (name, curve_) in enumerate(settings.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for score, colour in zip(SCORES, COLOURS, strict=False):
            axes.errorbar(
                range(len(curve_)),
                [point[score]["mean"] for point in curve_],
                yerr=[point[score]["standard_deviation"] or 0.0 for point in curve_],
                color=colour,
                marker="o",
                markersize=4,
                capsize=3,
                label=score,
            )
        default = found["defaults"][name]
        values = [point["value"] for point in curve_]
        if default in values:
            axes.axvline(values.index(default), color="black", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(values)), [str(value) for value in values])
        axes.set(xlabel=name)
        if number == 0:
            axes.legend(fontsize=8, frameon=False)
    tasks = ", ".join(found["tasks"])
    figure.suptitle(f"{found['method']}, {found['budget']} entries, on {tasks}; dotted: the default", fontsize=9)
    return figure


def _says(method: str, budget: int, tasks: Sequence[str], settings: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    told = []
    for name, curve_ in settings.items():
        means = [point["AP"]["mean"] for point in curve_]
        low, high, best = min(means), max(means), curve_[means.index(max(means))]["value"]
        told.append(
            f"{low:.3f} to {high:.3f} over {name} (best at {best})" if high > low else f"{low:.3f} at any {name}"
        )
    return f"AP of {method} with {budget} entries on {', '.join(tasks)}: {'; '.join(told)}."
