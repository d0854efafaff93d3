"""What a folder of streams holds, read once; nothing is measured here.

OUT/commands.jsonl    every command that worked on the folder, with the machine it ran on: see `record_command`
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.continual.comparison import Streams
from benchmarks.continual.footprint_table import Conversion, conversions, mean_picture_bytes
from benchmarks.continual.report.commands import read_commands
from benchmarks.continual.report.names import place
from benchmarks.continual.results import WHERE, Finished, FinishedRun
from benchmarks.continual.suites import TaskData
from inducekv_vllm.errors import ConfigError, TaskDataError
from inducekv_vllm.footprint import read_config, text_geometry
from selector.data.examples import Example


@dataclass(frozen=True)
class TaskShown:
    """One of a task's questions as a reader sees it, with its picture and what methods answered after the last task."""

    task: str
    questions: int  # that were asked about the task
    text: str
    expected: str
    picture: bytes | None  # PNG; None: the question has none
    answers: Mapping[str, str]  # by method


@dataclass(frozen=True)
class Diagnosed:
    """What a diagnostic found: its JSON, and its plot as PNG."""

    found: Mapping[str, Any]
    plot: bytes | None

    @property
    def says(self) -> str:
        """In one or several sentences."""
        said = self.found["says"]
        return said if isinstance(said, str) else " ".join(said)


@dataclass(frozen=True)
class Findings:
    """All that the page and the JSON file are made of."""

    configuration: Mapping[str, Any]  # of run.json, but for where things lay
    streams: Streams
    tasks: tuple[TaskShown, ...]  # in the order of learning, the base last; empty where the data cannot be read
    no_tasks_because: str | None
    footprint: tuple[Conversion, ...]  # of the run's model, a row for each budget
    picture_bytes: float | None  # of an exemplar as JPEG, on average
    diagnostics: tuple[Diagnosed, ...]
    commands: tuple[Mapping[str, Any], ...]
    tuned: Mapping[str, Any] | None  # what a search found, see `tuned.read_tuned`


def read_findings(
    out: Path, model: Path | None = None, data: Path | None = None, tuned: Mapping[str, Any] | None = None
) -> Findings:
    """
    Args:
        model, data: None for where the run found them.
        tuned: what a search has found, see `tuned.read_tuned`.

    Raises:
        ConfigError: the folder is not one of a run, its runs do not belong together, or the model is another.
    """
    finished = Finished.read(out, model, data)
    runs = [*finished.complete, *finished.unfinished]
    if not runs:
        raise ConfigError(f"{out}: no task of any stream is done yet")
    known = finished.configuration["model"]["name"]
    if finished.model.name != known:
        raise ConfigError(f"{out} is of the model {known!r}: name its folder with --model, found {finished.model}")
    runs.sort(key=lambda run: place(run.method))
    streams = Streams([run.matrix for run in runs])
    shown, because, picture_bytes = _tasks(finished)
    geometry = text_geometry(read_config(finished.model / "config.json"))
    return Findings(
        configuration={key: value for key, value in finished.configuration.items() if key != WHERE},
        streams=streams,
        tasks=shown,
        no_tasks_because=because,
        footprint=tuple(conversions(geometry, streams.budgets, picture_bytes=picture_bytes)),
        picture_bytes=picture_bytes,
        diagnostics=tuple(_diagnostics(out / "diagnostics")),
        commands=tuple(read_commands(out)),
        tuned=tuned,
    )


# ----------------------------------------------------------------------------------------------------- the tasks


def _tasks(finished: Finished) -> tuple[tuple[TaskShown, ...], str | None, float | None]:
    """The tasks, or why they cannot be shown; and what their pictures take as JPEG."""
    try:
        suite = finished.suite
    except (ConfigError, TaskDataError) as error:
        return (), str(error), None
    last = _last_predictions(finished.complete)
    shown = tuple(_shown(task, last) for task in (*suite.tasks, suite.base))
    return shown, None, mean_picture_bytes([example for task in suite.tasks for example in task.train])


def _last_predictions(runs: Sequence[FinishedRun]) -> dict[str, dict[tuple[str, str], Any]]:
    """Of each method's first complete run, after its last task."""
    first: dict[str, FinishedRun] = {}
    for run in runs:
        first.setdefault(run.method, run)
    return {method: dict(run.predictions()) for method, run in first.items()}


def _shown(task: TaskData, predictions: Mapping[str, Mapping[tuple[str, str], Any]]) -> TaskShown:
    example = task.test[0]
    pictures = example.load_images()
    png = None
    if pictures:
        content = io.BytesIO()
        pictures[0].save(content, "PNG")
        png = content.getvalue()
    key = (task.name, example.id)
    answers = {method: found[key].answer for method, found in predictions.items() if key in found}
    return TaskShown(task.name, len(task.test), question_text(example), example.answer, png, answers)


def question_text(example: Example) -> str:
    """The text of the last message."""
    parts = example.messages[-1]["content"]
    return " ".join(part["text"] for part in parts if part["type"] == "text")


# ------------------------------------------------------------------------------------------------- the diagnostics


def _diagnostics(folder: Path) -> list[Diagnosed]:
    """By file name.

    Raises:
        ConfigError: a file is not one of a diagnostic.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            plot = path.with_suffix(".png")
            found.append(Diagnosed(content, plot.read_bytes() if plot.exists() else None))
            assert isinstance(content["diagnostic"], str)
            assert isinstance(found[-1].says, str)
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise ConfigError(f"{path}: not what a diagnostic writes: {error!r}") from error
    return found
