"""The folder of a run as it is read again: by diagnostics, by the report, and by runs that go on.

    finished = Finished.read(OUT)                    the folder of a `python -m benchmarks.research.continual run`
    for run in finished.runs("refined", 32):         one for each seed
        run.accuracy, run.bundle(), run.predictions()

Shapes: T tasks, n questions, d hidden size.
"""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.research.continual.comparison import UNTOUCHED
from benchmarks.research.continual.methods import Artifact
from benchmarks.research.continual.metrics import Matrix, accuracy_matrix
from benchmarks.research.continual.suites import LoadOptions, Suite, TaskData, load_suite
from inducekv_vllm.bundle import Bundle, read_bundle
from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.backbone.extraction import extract_keys
from selector.backbone.model import Backbone
from server.demo import CHECKPOINT

STATE = "state"  # the folder of what a method made of a task
WHERE = "where"  # key of run.json: where the run read its files, which may have moved since


def weights_digest(model: Path) -> str:
    """sha256 over the files of the model's weights; the folder's place does not matter. Raises ConfigError: none."""
    files = sorted(model.glob("*.safetensors")) or sorted(model.glob("*.bin"))
    if not files:
        raise ConfigError(f"{model}: expected weights in *.safetensors or *.bin, found none")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class Prediction:
    """The answer to one question after a task."""

    task: str
    id: str
    expected: str
    answer: str
    score: float | None  # None: it does not count

    @property
    def right(self) -> bool:
        """Whether the answer has at least half of what a right one gets."""
        return self.score is not None and self.score >= 0.5


@dataclass(frozen=True)
class FinishedRun:
    """One method with one budget and one seed, all tasks done."""

    folder: Path  # OUT/METHOD/budget-B/seed-S
    matrix: Mapping[str, Any]  # of matrix.json, as are the next ones
    method: str
    budget: int
    seed: int
    order: list[str]  # the T tasks as they were learned
    base: list[float | None]  # accuracy on the base questions after each task, [T]; None: there are none

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """From its matrix.json. Raises ConfigError: the file does not parse."""
        matrix = read_json(path, "cannot read a run's results")
        return cls(path.parent, matrix, *(matrix[key] for key in ("method", "budget", "seed", "order", "base")))

    @cached_property
    def accuracy(self) -> Matrix:
        """a[i, t], [T, T]."""
        return accuracy_matrix(self.matrix["accuracy"])

    def task_folder(self, number: int = -1) -> Path:
        """Of task `number` of the order, negative ones counted from its end."""
        number = range(len(self.order))[number]
        return self.folder / f"{number:02d}-{self.order[number]}"

    def state(self, number: int = -1) -> Path:
        return self.task_folder(number) / STATE

    def artifact(self, number: int = -1) -> Artifact:
        """The artifact that answers after task `number`. Raises ConfigError: the state was not kept."""
        state = self.state(number)
        try:
            return Artifact.read(state)
        except OSError as error:
            raise ConfigError(
                f"{state}: the state after this task was not kept; `--keep-states all` of the run keeps every one"
            ) from error

    def bundle(self, number: int = -1) -> Bundle:
        """The memory after task `number`. Raises ConfigError: the method makes no memory, or it was not kept."""
        artifact = self.artifact(number)
        if artifact.kind != "bundle" or artifact.path is None:
            raise ConfigError(f"{self.method} has no memory bundle to look at: what it makes is {artifact.kind!r}")
        return read_bundle(self.state(number) / artifact.path)

    def predictions(self, number: int = -1) -> dict[tuple[str, str], Prediction]:
        """All answers after task `number` by task and id, as asked. Raises TaskDataError: the file does not parse."""
        path = self.task_folder(number) / "predictions.jsonl"
        try:
            lines = [Prediction(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, TypeError) as error:
            raise TaskDataError(f"{path}: cannot read the predictions: {error}") from error
        return {(line.task, line.id): line for line in lines}


@dataclass(frozen=True)
class Finished:
    """The folder of a run, with all its streams; diagnostics read the complete ones."""

    out: Path
    model: Path
    data: Path
    configuration: Mapping[str, Any]  # of run.json
    complete: tuple[FinishedRun, ...]  # by method, budget and seed
    unfinished: tuple[FinishedRun, ...] = ()  # likewise; begun, with tasks still to do
    _keys: dict[str, Tensor] = field(default_factory=dict)  # of tasks, once they were computed

    @classmethod
    def read(cls, out: Path, model: Path | None = None, data: Path | None = None) -> Finished:
        """`model`, `data`: None for where the run found them; the data may also have moved with the folder."""
        configuration = read_json(out / "run.json", "not the folder of a run")
        runs = [FinishedRun.read(path) for path in out.glob("*/budget-*/seed-*/matrix.json")]
        runs.sort(key=lambda run: (run.method, run.budget, run.seed))
        complete = tuple(run for run in runs if run.matrix["complete"])
        unfinished = tuple(run for run in runs if not run.matrix["complete"])
        where = configuration.get(WHERE, {})
        model = model or Path(where.get("model", CHECKPOINT))
        if data is None:
            recorded = Path(where.get("data", out / "data"))
            data = recorded if recorded.exists() else out / "data"
        return cls(out, model, data, configuration, complete, unfinished)

    def runs(
        self, method: str, budget: int | None = None, seeds: Sequence[int] | None = None
    ) -> tuple[FinishedRun, ...]:
        """The finished runs of a method and a budget (None: the method's only one), one for each seed (None: all).

        Raises ConfigError: there is none, a seed is missing, or the budget is not clear.
        """
        chosen = [run for run in self.complete if run.method == method and budget in (None, run.budget)]
        found = [run for run in chosen if seeds is None or run.seed in seeds]
        if not found or {run.seed for run in found} < set(seeds or ()):
            wanted = f"{method}, budget {budget}, seeds {seeds or 'any'}"
            there = ", ".join(sorted({f"{run.method} {run.budget} {run.seed}" for run in self.complete}))
            raise ConfigError(f"no finished run of {wanted} under {self.out}; there are: {there or 'none'}")
        if len(budgets := sorted({run.budget for run in found})) > 1:
            raise ConfigError(f"{self.out} has runs of {method} with the budgets {budgets}: name one")
        return tuple(found)

    def chosen(self, options: Namespace) -> tuple[FinishedRun, ...]:
        """The runs that the options name."""
        return self.runs(options.method, options.budget, options.seed)

    def has(self, method: str) -> bool:
        return any(run.method == method for run in self.complete)

    def counterpart(self, run: FinishedRun, method: str) -> FinishedRun:
        """Another method's run with the same budget and seed; of the untouched model, which has neither, any run."""
        if method == UNTOUCHED and self.has(UNTOUCHED):
            return next(other for other in self.complete if other.method == UNTOUCHED)
        return self.runs(method, run.budget, [run.seed])[0]

    def paired(
        self, run: FinishedRun, method: str = UNTOUCHED, number: int = -1
    ) -> list[tuple[Prediction, Prediction]]:
        """The two runs' answers to each question after task `number`. Raises TaskDataError: the questions differ."""
        other = self.counterpart(run, method)
        mine, theirs = run.predictions(number), other.predictions(number)
        if mine.keys() != theirs.keys():
            raise TaskDataError(f"{run.folder} and {other.folder} have predictions of different questions")
        return [(mine[key], theirs[key]) for key in mine]

    @cached_property
    def whole_suite(self) -> Suite:
        """All tasks of the suite, in its own order, with all their examples."""
        configuration = self.configuration
        where = configuration.get(WHERE, configuration)
        options = LoadOptions(
            configuration.get("scoring", "published"),
            Path(where["images"]) if "images" in where else None,
            configuration.get("allow_missing", False),
            configuration["train_limit"],
        )
        return load_suite(where["suite"], self.data, options)  # its name, or its file

    @cached_property
    def suite(self) -> Suite:
        """The tasks in the run's order, with the questions asked. Raises ConfigError: the data are not the run's."""
        run = self.configuration
        suite = self.whole_suite.with_validation().ordered(run["order"]).asked_about(run["split"])
        suite = suite.limited(run["train_limit"], run["test_limit"], run["base_limit"])
        if suite.digest() != run["data"]:
            raise ConfigError(f"{self.data}: these are not the data of the run {self.out}")
        return suite

    @cached_property
    def backbone(self) -> Backbone:
        """The run's model. Raises ConfigError: the folder holds another model."""
        recorded = self.configuration["model"]
        backbone = Backbone.load(self.model)
        if weights_digest(self.model) != recorded["weights"]:
            raise ConfigError(f"{self.model}: not the model of the run {self.out}, which is {recorded['name']!r}")
        return backbone

    def keys(self, task: TaskData) -> Tensor:
        """Of a task's test questions: [n, d], see `Backbone.retrieval_keys`. Computed once."""
        if task.name not in self._keys:
            self._keys[task.name] = extract_keys(self.backbone, task.test, batch_size=64)
        return self._keys[task.name]


def describe_runs(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Of one method and budget: what most diagnostics' JSON values begin with."""
    return {"method": runs[0].method, "budget": runs[0].budget, "seeds": [run.seed for run in runs]}


def read_json(path: Path, problem: str, check: Callable[[Any], Any] = bool) -> dict[str, Any]:
    """The content of a file. Raises ConfigError: it is no JSON, or not what `check` finds true; `problem` says what."""
    try:
        content = json.loads(path.read_bytes())
        if not check(content):
            raise ValueError("its content is of another kind")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"{path}: {problem}: {reason}") from error
    return content
