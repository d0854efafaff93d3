"""What a published suite is: tasks in their published order, where their files may lie, and how answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.research.published.rows import read_questions, require_folder
from benchmarks.research.published.scorers.scored import Question, Rule
from inducekv_vllm.errors import ConfigError, TaskDataError


@dataclass(frozen=True)
class Files:
    """The files of one task: every folder in which they may lie, in the order in which they are looked for."""

    data: Path
    folders: tuple[Path, ...]

    def find(self, *names: str) -> Path:
        """The first file of these names. Raises TaskDataError: says what was expected and where."""
        for folder in self.folders:
            for name in names:
                if (folder / name).is_file():
                    return folder / name
        inside = sorted({str(folder.relative_to(self.data)) for folder in self.folders})
        raise TaskDataError(f"{self.data}: expected {' or '.join(names)} in {', '.join(inside)}, found none")

    def has(self, *names: str) -> bool:
        return any((folder / name).is_file() for folder in self.folders for name in names)


Read = Callable[[Files], list[Question]]


@dataclass(frozen=True)
class Task:
    """One task of a suite.

    `folders` are the names that published layouts give it, `rules` how its answers are scored, by the publisher of
    the script; the first is the suite's own.
    """

    name: str
    folders: tuple[str, ...]
    rules: Mapping[str, Rule]
    train: tuple[str, ...] = ("train.json",)
    test: tuple[str, ...] = ("test.json",)
    read: Read | None = None  # None: rows of questions with one answer
    new_tokens: int = 128  # that the published script lets a model write
    others: tuple[str, ...] = ()  # further files that its scorer reads

    def questions(self, files: Files) -> list[Question]:
        return self.read(files) if self.read is not None else read_questions(files.find(*self.test))

    def rule(self, publisher: str | None = None) -> Rule:
        """Raises ConfigError: nobody of that name has published a scorer of this task."""
        name = publisher or next(iter(self.rules))
        if name not in self.rules:
            raise ConfigError(f"task {self.name}: expected the scorer of {' or '.join(self.rules)}, found {name!r}")
        return self.rules[name]


@dataclass(frozen=True)
class PublishedSuite:
    """`parents` are the folders below the data folder in which tasks' folders may lie."""

    name: str
    tasks: tuple[Task, ...]
    parents: tuple[str, ...]
    orders: Mapping[str, Sequence[str]] = field(default_factory=dict)  # beside the default one
    not_learned: str = ""  # why it cannot be learned as a stream here; its scorers work all the same

    def task(self, name: str) -> Task:
        """By its name or one of its folders', in any case. Raises ConfigError: there is none."""
        wanted = name.casefold()
        for task in self.tasks:
            if wanted in {known.casefold() for known in (task.name, *task.folders)}:
                return task
        raise ConfigError(f"suite {self.name!r} has no task {name!r}, it has: {', '.join(t.name for t in self.tasks)}")

    def order(self, name: str | None = None) -> list[str]:
        """The tasks' names in the suite's own order, or another. Raises ConfigError: there is no such order."""
        if name is None:
            return [task.name for task in self.tasks]
        if name not in self.orders:
            known = ", ".join(self.orders) or "none but the default"
            raise ConfigError(f"suite {self.name!r} has no order {name!r}, it has: {known}")
        return list(self.orders[name])

    def files(self, task: Task, data: Path) -> Files:
        """Raises TaskDataError: the data are no folder."""
        require_folder(data)
        below = [data / parent / folder for folder in task.folders for parent in self.parents]
        return Files(data, tuple(dict.fromkeys([*below, *(data / parent for parent in self.parents)])))
