"""The anchor store: examples of past tasks, kept apart from bundles and used by the selector alone.

    DIR/manifest.json               one record for each task, in the order of the stream
    DIR/0000/examples.jsonl         task data, as `selector.data.examples.read_task` reads it
    DIR/0000/images/SHA256.png      the images' bytes, unchanged

The store is append-only. A task's folder is complete on disk before the manifest names it, and the manifest is replaced
atomically, so that a killed run leaves the store unchanged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inducekv_vllm.errors import ConfigError, TaskDataError

from ..runtime.files import replace_file
from .choice import AnchorPolicy
from .examples import Example, read_task

MANIFEST = "manifest.json"


class AnchorTask(BaseModel):
    """One task's anchors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: tuple[str, ...] = Field(min_length=1)  # the examples' task names
    run: str  # the run that appended them; appending them again changes nothing
    policy: AnchorPolicy
    seed: int
    count: int = Field(ge=1)
    digest: str  # see `examples_digest`
    bytes: int  # of its folder's files


class _Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    tasks: tuple[AnchorTask, ...] = ()


@dataclass(frozen=True)
class AnchorStore:
    """The anchors under one folder; a folder that does not exist is an empty store."""

    folder: Path

    def tasks(self) -> tuple[AnchorTask, ...]:
        """Raises TaskDataError: the manifest cannot be read."""
        path = self.folder / MANIFEST
        if not path.exists():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.glob("[!.]*"))):
                if _only_unfinished(self.folder):
                    return ()
                raise TaskDataError(f"{self.folder}: not an anchor store: it has no {MANIFEST}")
            return ()
        try:
            return _Manifest.model_validate_json(path.read_bytes()).tasks
        except (OSError, ValidationError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise TaskDataError(f"{path}: the manifest of the anchors cannot be read: {reason}") from error

    def read(self, *, except_run: str | None = None) -> list[Example]:
        """All anchors in the order of the stream, checked against their digests.

        Args:
            except_run: leave out what this run has appended.

        Raises:
            TaskDataError: a file is missing, damaged or altered, naming it.
        """
        anchors: list[Example] = []
        for number, task in enumerate(self.tasks()):
            path = self._task_folder(number) / "examples.jsonl"
            examples = read_task(path)
            if examples_digest(examples) != task.digest or len(examples) != task.count:
                raise TaskDataError(f"{path}: the anchors do not match their digest: damaged or altered")
            if task.run != except_run:
                anchors += examples
        return anchors

    def bytes(self) -> int:
        """Of all tasks' files."""
        return sum(task.bytes for task in self.tasks())

    def require_new(self, tasks: Sequence[str], run: str) -> None:
        """Raises ConfigError: another run has already appended anchors of one of the tasks."""
        for stored in self.tasks():
            for name in sorted(set(tasks) & set(stored.tasks)):
                if stored.run != run:
                    raise ConfigError(
                        f"{self.folder} already has anchors of the task {name!r}, made by another run; "
                        "a store is only ever appended to: use another folder to repeat a task"
                    )

    def append(self, examples: Sequence[Example], *, run: str, policy: AnchorPolicy, seed: int) -> None:
        """Append one task's anchors, durably, unless this run has already done so.

        Raises:
            ConfigError: another run has appended anchors of this task, or the files cannot be written.
        """
        tasks = self.tasks()
        if any(task.run == run for task in tasks):
            return
        self.require_new([example.task for example in examples], run)
        folder = self._task_folder(len(tasks))
        try:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it wrote the manifest
            size = _write_examples(folder, examples)
            added = AnchorTask(
                tasks=tuple(sorted({example.task for example in examples})),
                run=run,
                policy=policy,
                seed=seed,
                count=len(examples),
                digest=examples_digest(examples),
                bytes=size,
            )
            manifest = _Manifest(tasks=(*tasks, added)).model_dump_json(indent=1)
            replace_file(self.folder / MANIFEST, manifest.encode())
        except OSError as error:
            if len(self.tasks()) == len(tasks):
                shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"{self.folder}: cannot write the anchors: {error}") from error

    def _task_folder(self, number: int) -> Path:
        return self.folder / f"{number:04d}"


def examples_digest(examples: Sequence[Example]) -> str:
    """sha256 over everything in the examples that a loss depends on; not their paths."""
    content = [(e.id, e.task, e.source_digest, e.answer) for e in examples]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _write_examples(folder: Path, examples: Sequence[Example]) -> int:
    """Write the folder of one task; returns the bytes of its files."""
    image_folder = folder / "images"
    image_folder.mkdir(parents=True)
    size = 0
    lines = []
    for example in examples:
        names = []
        for image in example.images:
            data = image.read_bytes()
            name = f"{hashlib.sha256(data).hexdigest()}{image.suffix}"
            if not (image_folder / name).exists():
                replace_file(image_folder / name, data)
                size += len(data)
            names.append(f"images/{name}")
        lines.append(json.dumps(_record(example, names), ensure_ascii=False))
    text = "".join(line + "\n" for line in lines).encode()
    replace_file(folder / "examples.jsonl", text)
    return size + len(text)


def _record(example: Example, images: list[str]) -> dict[str, Any]:
    """The example as a line of task data, with `images` in place of its image parts."""
    remaining = iter(images)
    messages = [
        {
            "role": message["role"],
            "content": [
                part if part["type"] == "text" else {"type": "image", "image": next(remaining)}
                for part in message["content"]
            ],
        }
        for message in example.messages
    ]
    return {"id": example.id, "task": example.task, "messages": messages, "answer": example.answer}


def _only_unfinished(folder: Path) -> bool:
    """Whether only the first task's folder is there: a run was killed before it wrote the first manifest."""
    return folder.is_dir() and {path.name for path in folder.glob("[!.]*")} == {"0000"}
