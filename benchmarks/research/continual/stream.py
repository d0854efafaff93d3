"""A stream, task by task: learn, answer the questions of all tasks so far and of the base, write the results.

    OUT/run.json                                   the configuration; a run with another one is refused
    OUT/answers/                                   all answers so far: see `answering.stored_answers`
    OUT/METHOD/budget-B/seed-S/settings.json       the method's settings; likewise
                              /NN-TASK/state/      the method's state after the task
                              /NN-TASK/predictions.jsonl, result.json
                              /matrix.json         everything so far: a[i, t], base accuracy, bytes, seconds, metrics

Every file is whole or absent, and no file is written twice: a run that was killed goes on with the first task that has
no result, and nothing is counted twice. A task with a result is finished; only the next task needs its state.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from benchmarks.locks import HeldElsewhere, locked
from benchmarks.research.continual.answering import Answerer
from benchmarks.research.continual.answering.http import EndpointFailed
from benchmarks.research.continual.answering.stored_answers import StoredAnswers
from benchmarks.research.continual.methods import Artifact, Method, RunContext
from benchmarks.research.continual.metrics import accuracy_matrix, summary
from benchmarks.research.continual.results import STATE, WHERE
from benchmarks.research.continual.suites import Suite, TaskData
from benchmarks.research.continual.suites.suite import TaskScore, same_answers
from inducekv_vllm.errors import ConfigError
from selector.runtime.files import replace_file

KeepStates = Literal["last", "all", "none"]
PATIENCE = 5.0  # seconds: a process that was killed a moment ago may still hold its stream


@dataclass(frozen=True)
class Run:
    """One method with one budget and one seed over one suite."""

    suite: Suite
    method: Method
    model: Path
    budget: int
    seed: int
    folder: Path  # OUT of the whole command

    @property
    def own_folder(self) -> Path:
        return self.folder / self.method.name / f"budget-{self.budget}" / f"seed-{self.seed}"

    def task_folder(self, number: int) -> Path:
        return self.own_folder / f"{number:02d}-{self.suite.tasks[number].name}"

    def state(self, number: int) -> Path:
        """What the method made of a task: whole or absent."""
        return self.task_folder(number) / STATE

    def unfinished_state(self, number: int) -> Path:
        return self.task_folder(number) / f"{STATE}.tmp"

    @property
    def title(self) -> str:
        return f"{self.method.name}, budget {self.budget}, seed {self.seed}"

    @property
    def next_task(self) -> int:
        """The first without a result; the number of tasks if the stream is finished."""
        tasks = range(len(self.suite.tasks))
        return next((n for n in tasks if not (self.task_folder(n) / "result.json").exists()), len(tasks))

    @property
    def finished(self) -> bool:
        return self.next_task == len(self.suite.tasks)


def claim(folder: Path, name: str, configuration: dict[str, Any], where: dict[str, Any] | None = None) -> None:
    """Writes the configuration, or checks that the folder has the same. Raises ConfigError: it names the difference."""
    path = folder / name
    new = json.loads(json.dumps(configuration))
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, new | ({WHERE: where} if where else {}))
        old = {key: value for key, value in json.loads(path.read_bytes()).items() if key != WHERE}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot keep the results here: {error}") from error
    differing = sorted(key for key in {*new, *old} if new.get(key) != old.get(key))
    if differing:
        what = "; ".join(f"{key}: {old.get(key)!r} there, {new.get(key)!r} here" for key in differing)
        raise ConfigError(f"{path}: the results are of another configuration ({what}); choose another folder")


def run_stream(run: Run, answerer: Answerer, keep: KeepStates = "last") -> dict[str, Any]:
    """All tasks not done yet; returns the content of `matrix.json`. Raises ConfigError: the stream cannot go on."""
    answers = StoredAnswers(run.folder / "answers", answerer)
    with alone(run):
        while not run.finished:
            take_task(run, run.next_task, answers)
            tidy(run, keep)
        tidy(run, keep)
        return write_matrix(run)


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Holds the stream for this process. Raises ConfigError: another one is at it, or see `claim_stream`."""
    claim_stream(run)
    try:
        with locked(run.own_folder / "lock", PATIENCE):
            yield
    except HeldElsewhere as error:
        raise ConfigError(f"{run.own_folder}: another process is at this stream; wait for it, or end it") from error
    except PermissionError as error:
        raise ConfigError(f"{run.own_folder}: cannot go on here: {error}") from error


def claim_stream(run: Run) -> None:
    """Raises ConfigError: the stream was begun with other settings of the method."""
    claim(run.own_folder, "settings.json", asdict(run.method))  # type: ignore[call-overload]


def take_task(run: Run, number: int, answers: StoredAnswers) -> None:
    artifact = learn(run, number)
    try:
        result = evaluate(run, number, artifact, answers)
    except EndpointFailed as error:
        where = f"task {number + 1} of {len(run.suite.tasks)}, {run.suite.tasks[number].name}"
        raise EndpointFailed(f"{error} ({run.title}, after learning {where})") from error
    write_matrix(run)
    log(f"{run.title}: {run.suite.tasks[number].name}: {format_result(result)}")


def learn(run: Run, number: int) -> Artifact:
    """The state after task `number`, learned unless it exists. Raises ConfigError: the previous state is gone."""
    state, unfinished = run.state(number), run.unfinished_state(number)
    if not state.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        previous = run.state(number - 1) if number else None
        if previous is not None and not previous.exists():
            raise ConfigError(f"{previous} is gone, and the stream goes on from it: remove {run.own_folder} to redo it")
        context = RunContext(run.model, run.budget, run.seed, number, len(run.suite.tasks), run.suite.base.train)
        began = time.monotonic()
        artifact = run.method.learn(run.suite.tasks[number], previous, unfinished, context)
        artifact.write(unfinished)
        write_json(unfinished / "seconds.json", round(time.monotonic() - began, 1))
        unfinished.rename(state)
    return Artifact.read(state)


def evaluate(run: Run, number: int, artifact: Artifact, answers: StoredAnswers) -> dict[str, Any]:
    """Asks the test questions of the tasks 0 to `number` and of the base; writes predictions, then the result."""
    folder = run.task_folder(number)
    began = time.monotonic()
    tasks = (*run.suite.tasks[: number + 1], run.suite.base)
    questions = [(task, example) for task in tasks for example in task.test]
    texts, num_asked = answers.answers(artifact, run.state(number), [example for _, example in questions])
    answered = iter(texts)
    scores = [_score(run.suite, task, list(islice(answered, len(task.test)))) if task.test else None for task in tasks]
    each = [value for score in scores if score is not None for value in score.questions]
    lines = [
        {"task": task.name, "id": example.id, "expected": example.answer, "answer": text, "score": value}
        for (task, example), text, value in zip(questions, texts, each, strict=True)
    ]
    *row, base = [None if score is None else score.value for score in scores]
    result = {
        "task": run.suite.tasks[number].name,
        "accuracy": row,
        "base": base,
        "stored_bytes": artifact.stored_bytes,
        "anchor_bytes": artifact.report.get("anchor_bytes", 0),
        "questions": {"answered": len(questions), "asked": num_asked},
        "seconds": {
            "learn": json.loads((run.state(number) / "seconds.json").read_bytes()),
            "evaluate": round(time.monotonic() - began, 1),
        },
        "report": artifact.report,
    }
    replace_file(folder / "predictions.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    write_json(folder / "result.json", result)
    return result


def _score(suite: Suite, task: TaskData, texts: Sequence[str]) -> TaskScore:
    """Base questions have one right answer each, whatever the suite's tasks have."""
    return (same_answers if task is suite.base else suite.score)(task.name, task.test, texts)


def tidy(run: Run, keep: KeepStates) -> None:
    """Removes the states that neither the stream nor the user needs any more."""
    done = run.next_task
    needless = {"all": 0, "last": done - 1, "none": done if run.finished else done - 1}[keep]
    for number in range(needless):
        state, going = run.state(number), run.unfinished_state(number)
        if state.exists():
            shutil.rmtree(going, ignore_errors=True)
            state.rename(going)  # half a state never stands under the name of a whole one
        shutil.rmtree(going, ignore_errors=True)


def write_matrix(run: Run) -> dict[str, Any]:
    collected = collect(run)
    write_json(run.own_folder / "matrix.json", collected)
    return collected


def collect(run: Run) -> dict[str, Any]:
    """The results of all finished tasks together, from their files alone."""
    results = [json.loads((run.task_folder(n) / "result.json").read_bytes()) for n in range(run.next_task)]
    base, rows = [result["base"] for result in results], [result["accuracy"] for result in results]
    matrix = accuracy_matrix(rows)
    parts = ("stored_bytes", "anchor_bytes", "questions", "seconds")
    return {
        "suite": run.suite.name,
        "method": run.method.name,
        "settings": asdict(run.method),  # type: ignore[call-overload]
        "budget": run.budget,
        "seed": run.seed,
        "order": [task.name for task in run.suite.tasks],
        "complete": len(results) == len(run.suite.tasks),
        "accuracy": rows,
        "base": base,
        **{name: [result[name] for result in results] for name in parts},
        "metrics": summary(matrix, base) | {name: of(matrix) for name, of in run.suite.metrics.items()},
        "reports": [result["report"] for result in results],
    }


def format_result(result: dict[str, Any]) -> str:
    seen = " ".join(f"{value:.3f}" for value in result["accuracy"])
    seconds = result["seconds"]
    base = "" if result["base"] is None else f"; base {result['base']:.3f}"
    return f"seen {seen}{base}; {seconds['learn']:.0f} + {seconds['evaluate']:.0f} s"


def write_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(value, indent=1) + "\n").encode())


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def brief(collected: Mapping[str, Any]) -> dict[str, Any]:
    """A run without the training history of its reports."""
    reports = [{k: v for k, v in report.items() if k != "history"} for report in collected["reports"]]
    return {**collected, "reports": reports}
