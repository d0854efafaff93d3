"""The published suites as streams: rows as examples, and their own scorers and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.research.continual import metrics
from benchmarks.research.continual.suites.suite import Suite, TaskData, TaskScore
from benchmarks.research.published.check import image_root
from benchmarks.research.published.rows import pictures_of, read_rows, text_of
from benchmarks.research.published.scorers.scored import Mode, Prediction, Question
from benchmarks.research.published.suites import PublishedSuite, Task, published_suite
from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.data.examples import Example, example_of

METRICS: Mapping[str, Mapping[str, Any]] = {
    "ucit": {"UCIT: Last": metrics.average, "UCIT: Avg": metrics.mean_average_accuracy_over_time},
    "coin": {
        "CoIN: MAA": metrics.mean_average_accuracy_over_time,
        "CoIN: MFN": metrics.average,
        "CoIN: MFT": metrics.mean_of_new_tasks,
        "CoIN: BWT": metrics.backward_transfer,
    },
    "vqa10": {"CL-MoE: AP": metrics.average, "CL-MoE: forgetting": metrics.signed_forgetting},
    "vqacl": {"VQACL: AP": metrics.average, "VQACL: forgetting": metrics.signed_forgetting},
    "liit": {"LiIT: AvgAcc": metrics.average, "LiIT: forgetting": metrics.forgetting_rate},
}


@dataclass(frozen=True)
class LoadOptions:
    """How files of a published suite are read."""

    scoring: Mode = "published"
    images: Path | None = None  # None: see `image_root`
    allow_missing: bool = False  # rows without their pictures, and tasks without files, are left out
    train_limit: int | None = None  # rows of a task that are read at all


AS_PUBLISHED = LoadOptions()


@dataclass(frozen=True)
class PublishedScorer:
    """Scores a task's answers with the suite's own rule."""

    suite: str
    mode: Mode
    questions: Mapping[str, Mapping[str, Question]]  # by task and id

    def __call__(self, task: str, questions: Sequence[Example], answers: Sequence[str]) -> TaskScore:
        asked = [self.questions[task][question.id] for question in questions]
        predictions = [Prediction(*each) for each in zip((question.id for question in asked), answers, strict=True)]
        found = published_suite(self.suite).task(task).rule().score(self.mode, asked, predictions)
        return TaskScore(next(iter(found.metrics.values())) / 100, found.questions)


def load_published(name: str, data: Path, options: LoadOptions = AS_PUBLISHED) -> Suite:
    """Raises TaskDataError: files or pictures are missing (and may not be), or a row is malformed."""
    suite = published_suite(name)
    if suite.not_learned:
        raise ConfigError(
            f"suite {name!r} cannot be learned here: {suite.not_learned}; `benchmarks.research.score` scores it"
        )
    images = image_root(data, options.images)
    tasks, questions, absent = [], {}, []
    for task in suite.tasks:
        try:
            loaded, asked = _load_task(suite, task, data, images, options)
        except MissingFiles as error:
            absent.append(str(error))
            continue
        tasks.append(loaded)
        questions[task.name] = asked
    if absent and not (options.allow_missing and tasks):
        raise TaskDataError(
            f"{len(absent)} of {len(suite.tasks)} tasks lack files (--allow-missing leaves them out): {absent[0]}"
        )
    scorer = PublishedScorer(name, options.scoring, questions)
    limit = max(task.new_tokens for task in suite.tasks)
    return Suite(name, tuple(tasks), score=scorer, new_tokens=limit, metrics=METRICS.get(name, {}))


class MissingFiles(TaskDataError):
    """A task's files are not there."""


def _load_task(
    suite: PublishedSuite, task: Task, data: Path, images: Path, options: LoadOptions
) -> tuple[TaskData, dict[str, Question]]:
    files = suite.files(task, data)
    for names in (task.train, task.test):
        if not files.has(*names):
            raise MissingFiles(f"task {task.name}: no {' or '.join(names)}")
    questions = task.questions(files)
    asked = {question.id: question for question in questions}
    rows = islice(training_rows(files.find(*task.train)), options.train_limit)
    train = tuple(_existing(task.name, rows, images, options.allow_missing))
    rows = ((question.id, question.prompt, question.answers[0], pictures_of(question.row)) for question in questions)
    test = tuple(_existing(task.name, rows, images, options.allow_missing))
    return TaskData(task.name, train=train, test=test), asked


Row = tuple[str, str, str, list[str]]  # id, prompt, answer, pictures


def training_rows(path: Path) -> Iterator[Row]:
    """Rows of two turns, or flat ones. Ids repeat in published files: the n-th of one is "ID#n"."""
    seen: dict[str, int] = {}
    for number, row in enumerate(read_rows(path), start=1):
        place = f"{path}, item {number}"
        if "conversations" in row:
            turns = row["conversations"]
            if [turn.get("from") for turn in turns] != ["human", "gpt"]:
                raise TaskDataError(f"{place}: expected one turn of human and one of gpt, found {len(turns)} turns")
            prompt, answer = (str(turn.get("value", "")) for turn in turns)
        else:
            prompt = text_of(row, place, "text", "sent", "question")
            label = row.get("label") or {}
            answer = max(label, key=label.get) if label else text_of(row, place, "answer", "answer_bbox")
        name = text_of(row, place, "id", "question_id")
        seen[name] = seen.get(name, 0) + 1
        yield f"{name}#{seen[name]}" if seen[name] > 1 else name, prompt, answer, pictures_of(row)


def _existing(task: str, rows: Iterator[Row], images: Path, allow_missing: bool) -> Iterator[Example]:
    missing: list[str] = []
    for name, prompt, answer, pictures in rows:
        if gone := next((picture for picture in pictures if not (images / picture).is_file()), None):
            missing.append(gone)
            continue
        record = {"id": name, "task": task, "messages": prompt_messages(prompt, pictures), "answer": answer}
        yield example_of(record, images, f"task {task}, {name!r}")
    if missing and not allow_missing:
        raise TaskDataError(
            f"task {task}: {len(missing)} rows lack a picture below {images} (--allow-missing leaves them out), "
            f"the first is {missing[0]}"
        )


def prompt_messages(prompt: str, pictures: Sequence[str]) -> list[dict[str, Any]]:
    """One user turn: the pictures, then the text without LLaVA's marks for them."""
    text = prompt.replace("<image>\n", "").replace("\n<image>", "").replace("<image>", "")
    parts = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]
