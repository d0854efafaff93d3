"""A suite of data on disk, described by a TOML file as in docs/benchmarks.md, "Your own data"."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.research.continual.suites.suite import Suite, TaskData
from inducekv_vllm.errors import TaskDataError
from selector.data.examples import Example, read_task

BASE = "base"  # what the base questions are called among the tasks
SPLITS = ("train", "validation", "test")


class _Splits(BaseModel):
    model_config = ConfigDict(extra="forbid")

    train: Path
    validation: Path | None = None  # None: a part of the training examples
    test: Path


class _Task(_Splits):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # a part of folders' names


class _Description(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)
    tasks: tuple[_Task, ...] = Field(min_length=1)
    base: _Splits | None = None


def load(file: Path) -> Suite:
    """The suite of `file`, every picture opened. Raises TaskDataError: names the file, and the line or problem."""
    try:
        described = _Description.model_validate(_parse(file))
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        raise TaskDataError(f"{file}: describes no suite: {'; '.join(reasons)}") from error
    names = [task.name for task in described.tasks]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or BASE in names:
        raise TaskDataError(f"{file}: each task needs a name of its own, not {', '.join(repeated) or BASE!r}")
    tasks = tuple(_read(file, task.name, task) for task in described.tasks)
    base = TaskData(BASE) if described.base is None else _read(file, BASE, described.base)
    asked = {example.source_digest for example in base.examples}
    for task in tasks:
        for example in task.examples:
            if example.source_digest in asked:
                raise TaskDataError(f"{file}: the question {example.id!r} of {task.name} is also a base question")
    return Suite(described.name, tasks, base)


def _parse(file: Path) -> Any:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TaskDataError(f"{file}: cannot read the suite: {error}") from error
    except tomllib.TOMLDecodeError as error:  # with the line
        raise TaskDataError(f"{file}: malformed TOML: {error}") from error


def _read(file: Path, name: str, splits: _Splits) -> TaskData:
    """Raises TaskDataError: a split cannot be read, or an id or a question stands in two splits."""
    examples: dict[str, tuple[Example, ...]] = {}
    homes: dict[str, Path] = {}
    askers: dict[str, tuple[Path, str]] = {}  # of a question: its first file and id
    for split in SPLITS:
        if getattr(splits, split) is None:
            continue
        path = file.parent / getattr(splits, split)
        examples[split] = tuple(read_task(path))
        for example in examples[split]:
            if homes.setdefault(example.id, path) != path:
                raise TaskDataError(f"{path}: the id {example.id!r} is in {homes[example.id]} too")
            home, first = askers.setdefault(example.source_digest, (path, example.id))
            if home != path:
                raise TaskDataError(f"{path}: the question {example.id!r} is in {home} too, as {first!r}")
    return TaskData(name, **examples)
