"""What a method is: it turns a task and the state after the task before into a new state, on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.research.continual.suites import TaskData
from selector.data.examples import Example
from selector.runtime.files import replace_file

Kind = Literal["none", "bundle", "adapter", "gated_adapter", "gated_adapters", "exemplars", "copier", "attached"]
ARTIFACT = "artifact.json"


@dataclass(frozen=True)
class Artifact:
    """What answers questions after a task, beside the model.

    "none": nothing. "bundle": a memory. "adapter": a LoRA adapter. "gated_adapter": one behind a relevance gate.
    "gated_adapters": one for each task behind a gate. "exemplars": questions and answers to show. "copier": answers.
    "attached": whatever the function `attach`, "module:NAME", puts on a model: it gets the backbone and the path, and
    changes the backbone's model in place. Such an artifact answers in this process, whoever answers for the others.
    """

    kind: Kind
    path: str | None  # relative to the state's folder: a file, or an adapter's, the adapters' or the exemplars' folder
    stored_bytes: int  # what inference needs beside the model
    report: dict[str, Any]  # JSON values: what was chosen, and what it took
    attach: str | None = None

    def write(self, state: Path) -> None:
        replace_file(state / ARTIFACT, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, state: Path) -> Artifact:
        return cls(**json.loads((state / ARTIFACT).read_bytes()))


@dataclass(frozen=True)
class RunContext:
    """What a method gets beside the task."""

    model: Path
    budget: int  # B entries of memory, or the bytes that they take
    seed: int
    number: int  # of the task in the stream, from 0
    num_tasks: int  # of the whole stream
    base: Sequence[Example] = ()  # questions of what the model could do before; their answers must not be used


class Method(Protocol):
    """A frozen dataclass whose fields are the method's settings, recorded with its results."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind:
        """Of the artifacts that it makes: what an endpoint must load is known before anything is learned."""
        ...

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        """Learn `task` from the state folder `previous` (None for the first task); the new state goes into `out`.

        `out` exists and is empty, and the new state must not depend on `previous`, which may be removed later. The same
        arguments give the same state, so that an attempt that was killed can be repeated. `task.test` must not be used.
        """
        ...
