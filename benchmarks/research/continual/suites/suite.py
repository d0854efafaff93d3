"""What a suite is: data, a scorer of answers, and metrics of its own."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.chat import same_answer
from benchmarks.research.continual.metrics import Matrix
from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.data.anchors import examples_digest
from selector.data.examples import Example

DEFAULT_ORDER, RANDOM_ORDER = "default", "random:"
NEW_TOKENS = 12  # of an answer, where the suite does not say
HELD_OUT, MOST_HELD_OUT = 10, 128  # of training examples: a tenth, no more than that many


@dataclass(frozen=True)
class TaskData:
    """One task's three splits. Methods learn from `train`, choose by `validation`, and never see `test`."""

    name: str
    train: tuple[Example, ...] = ()
    validation: tuple[Example, ...] = ()
    test: tuple[Example, ...] = ()

    @property
    def examples(self) -> tuple[Example, ...]:
        """Of all splits."""
        return (*self.train, *self.validation, *self.test)

    def with_validation(self) -> TaskData:
        """With a tenth of the training examples as its validation split, if it has none.

        They are chosen by their content, and are no longer trained on. Raises TaskDataError: there are fewer than two.
        """
        if self.validation:
            return self
        if len(self.train) < 2:
            raise TaskDataError(f"task {self.name}: expected two training examples or more, found {len(self.train)}")
        count = max(1, min(len(self.train) // HELD_OUT, MOST_HELD_OUT))
        held = {e.id for e in sorted(self.train, key=lambda e: (e.source_digest, e.id))[:count]}
        kept = tuple(e for e in self.train if e.id not in held)
        return replace(self, train=kept, validation=tuple(e for e in self.train if e.id in held))


@dataclass(frozen=True)
class TaskScore:
    """What a suite's scorer gives a task: the value that enters the matrix, usually 0 to 1, and that of each question.

    None: a question that does not count.
    """

    value: float
    questions: tuple[float | None, ...]


# Of the name of a task, some of its test questions, and the text of the answer to each.
Scorer = Callable[[str, Sequence[Example], Sequence[str]], TaskScore]


def same_answers(task: str, questions: Sequence[Example], answers: Sequence[str]) -> TaskScore:
    """The share of answers that are equal but for case, space around them and final punctuation."""
    pairs = zip(questions, answers, strict=True)
    each = tuple(float(same_answer(text, question.answer)) for question, text in pairs)
    return TaskScore(sum(each) / len(each), each)


@dataclass(frozen=True)
class Suite:
    """A stream of tasks in the order of learning, and questions that the model could answer before it.

    `score` and `metrics` must be picklable: streams run in processes of their own.
    """

    name: str
    tasks: tuple[TaskData, ...]
    base: TaskData = TaskData("base")  # base questions, if there are any; what is measured is `base.test`
    score: Scorer = same_answers
    new_tokens: int = NEW_TOKENS  # that an answer may have
    metrics: Mapping[str, Callable[[Matrix], float]] = field(default_factory=dict)  # beside those of `metrics.summary`

    def in_order(self, order: Sequence[str]) -> Suite:
        """The tasks in another order: "default", "random:SEED", or names. Raises ConfigError: it is none of these."""
        first = order[0] if len(order) == 1 else ""
        if first == DEFAULT_ORDER:
            return self
        if first.startswith(RANDOM_ORDER):
            seed = first.removeprefix(RANDOM_ORDER)
            if not seed.isdecimal():
                raise ConfigError(f"a random order needs a number, {RANDOM_ORDER}SEED, found {first!r}")
            names = [task.name for task in self.tasks]
            return self.ordered(random.Random(int(seed)).sample(names, len(names)))
        return self.ordered(order)

    def ordered(self, names: Sequence[str]) -> Suite:
        """Only the tasks of `names`, in that order. Raises ConfigError: a name is unknown or repeated."""
        by_name = {task.name: task for task in self.tasks}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise ConfigError(f"suite {self.name!r} has no task {unknown[0]!r}, it has: {', '.join(by_name)}")
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"an order names each task once, and at least one; found {', '.join(names) or 'none'}")
        return replace(self, tasks=tuple(by_name[name] for name in names))

    def asked_about(self, split: Literal["test", "validation"]) -> Suite:
        """The suite with the questions of `split` as test questions, to choose settings without the test split."""
        if split == "test":
            return self
        tasks = tuple(replace(task, test=task.validation) for task in self.with_validation().tasks)
        return replace(self, tasks=tasks, base=replace(self.base, test=self.base.validation))

    def with_validation(self) -> Suite:
        """See `TaskData.with_validation`."""
        return replace(self, tasks=tuple(task.with_validation() for task in self.tasks))

    def limited(self, train: int, test: int, base: int) -> Suite:
        """The first examples and questions of each task and of the base. Raises ConfigError: a task would have none."""
        if min(train, test, base) < 1:
            raise ConfigError(
                f"at least one example and one question of each kind must be left, found limits {train}, {test}, {base}"
            )
        if empty := next((task.name for task in self.tasks if not (task.train and task.test)), None):
            raise ConfigError(f"task {empty!r} of suite {self.name!r} needs training examples and test questions")
        tasks = tuple(replace(task, train=task.train[:train], test=task.test[:test]) for task in self.tasks)
        return replace(self, tasks=tasks, base=replace(self.base, test=self.base.test[:base]))

    def digest(self) -> str:
        """sha256 over all tasks' examples; their place on disk and the order of tasks do not matter."""
        tasks = (*sorted(self.tasks, key=lambda task: task.name), self.base)
        splits = [split for task in tasks for split in (task.train, task.validation, task.test)]
        return hashlib.sha256("".join(examples_digest(split) for split in splits).encode()).hexdigest()
