"""What a suite is."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from inducekv_vllm.errors import ConfigError
from selector.data.anchors import examples_digest
from selector.data.examples import Example

DEFAULT_ORDER, RANDOM_ORDER = "default", "random:"


@dataclass(frozen=True)
class TaskData:
    """One task's three splits. Methods learn from `train`, choose by `validation`, and never see `test`."""

    name: str
    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]

    @property
    def examples(self) -> tuple[Example, ...]:
        """Of all splits."""
        return (*self.train, *self.validation, *self.test)


@dataclass(frozen=True)
class Suite:
    """A stream of tasks in the order of learning, and questions that the model could answer before it."""

    name: str
    tasks: tuple[TaskData, ...]
    base: TaskData  # base questions; what is measured is `base.test`

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
        tasks = tuple(replace(task, test=task.validation) for task in self.tasks)
        return replace(self, tasks=tasks, base=replace(self.base, test=self.base.validation))

    def limited(self, train: int, test: int, base: int) -> Suite:
        """The first examples and questions of each task and of the base. Raises ConfigError: none would be left."""
        if min(train, test, base) < 1:
            raise ConfigError(
                f"at least one example and one question of each kind must be left, found limits {train}, {test}, {base}"
            )
        tasks = tuple(replace(task, train=task.train[:train], test=task.test[:test]) for task in self.tasks)
        return replace(self, tasks=tasks, base=replace(self.base, test=self.base.test[:base]))

    def digest(self) -> str:
        """sha256 over all tasks' examples; their place on disk and the order of tasks do not matter."""
        tasks = (*sorted(self.tasks, key=lambda task: task.name), self.base)
        splits = [split for task in tasks for split in (task.train, task.validation, task.test)]
        return hashlib.sha256("".join(examples_digest(split) for split in splits).encode()).hexdigest()
