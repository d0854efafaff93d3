"""What a relevance gate is fitted to: questions of each task, and what it is to stay closed for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from inducekv_vllm.errors import ConfigError, TaskDataError

from ..data.examples import Example
from ..data.given import Data, read
from ..data.records import BY_NAME, Columns
from .background import everyday_requests, read_background
from .variations import text_of


@dataclass(frozen=True)
class GateData:
    """Answers are not used."""

    own: Mapping[str, Sequence[Example]] = field(default_factory=dict)  # of each task, in the order of the stream
    base: Sequence[Example] = ()  # questions that the model answers well by itself
    background: Sequence[Example] = ()  # other requests that need no memory, besides those of the package
    near_misses: Sequence[Example] = ()  # requests that look like those of a task and are not

    def of(self, own: Mapping[str, Sequence[Example]]) -> GateData:
        """With the tasks' own questions."""
        return replace(self, own=own)

    @property
    def of_no_task(self) -> tuple[Example, ...]:
        return (*self.base, *self.background, *self.near_misses)

    @property
    def counts(self) -> dict[str, int]:
        """What a bundle records of what its gate stays closed for."""
        counts = {"base_questions": len(self.base), "background_requests": len(self.background)}
        return counts | ({"near_misses": len(self.near_misses)} if self.near_misses else {})


NO_QUESTIONS: Final = GateData()


def read_others(base: Data = (), background: Data = (), near_misses: Data = (), columns: Columns = BY_NAME) -> GateData:
    """What a gate is to stay closed for: files, or rows. A .txt of requests has one a line.

    Args:
        columns: of a table of base questions.

    Raises:
        TaskDataError: the data cannot be read.
    """
    return GateData({}, read(base, columns=columns.of_others()), _requests(background), _requests(near_misses))


def _requests(data: Data) -> list[Example]:
    return read_background(data) if isinstance(data, str | Path) else read(data)


def check_questions(data: GateData) -> None:
    """Refuse what no gate can tell from each other.

    Raises:
        ConfigError: two tasks have the same questions, a task has one question several times, everyday requests are
            those of a task, or background requests or near-misses.
        TaskDataError: base questions are those of a task.
    """
    own = data.own
    task_of = {example.source_digest: task for task, examples in own.items() for example in examples}
    for example in data.base:
        if (task := task_of.get(example.source_digest)) is not None:
            raise TaskDataError(f"base question {example.id!r} is also a question of the task {task!r}")
    for example in data.background:
        if (task := task_of.get(example.source_digest)) is not None:
            raise ConfigError(f"background request {example.id!r} is also a question of the task {task!r}")
    said = {_said(example): task for task, examples in own.items() for example in examples if not example.images}
    for example in data.near_misses:
        if (task := task_of.get(example.source_digest, said.get(_said(example)))) is not None:
            raise ConfigError(f"near-miss {text_of(example.messages)!r} (--not) is a question of the task {task!r}")
    everyday = {request.text.casefold() for request in everyday_requests()}
    seen: dict[str, set[str]] = {}
    for task, examples in own.items():
        if not examples:
            raise ConfigError(f"the gate needs questions of the task {task!r}, and there are none")
        digests = {example.source_digest for example in examples}
        if len(examples) > 1 and len(digests) == 1:
            raise ConfigError(
                f"the task {task!r} has one question {len(examples)} times: the gate needs questions in other words"
            )
        common = [e for e in examples if text_of(e.messages).casefold() in everyday and not e.images]
        if len(common) > len(examples) / 2:
            raise ConfigError(
                f"{len(common)} of the {len(examples)} questions of the task {task!r} are everyday requests, such as "
                f"{text_of(common[0].messages)!r}: the gate stays closed for those"
            )
        for earlier, theirs in seen.items():
            if len(shared := digests & theirs) > min(len(digests), len(theirs)) / 2:
                raise ConfigError(
                    f"the tasks {earlier!r} and {task!r} have {len(shared)} questions in common: no gate can tell them"
                )
        seen[task] = digests


def _said(example: Example) -> str:
    return " ".join(text_of(example.messages).casefold().split())
