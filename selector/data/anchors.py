"""The anchor store: examples of past tasks, kept apart from bundles and used by the selector alone.

    DIR/manifest.json               one record for each task, in the order of the stream
    DIR/0000/examples.jsonl         task data, as `selector.data.examples.read_task` reads it
    DIR/0000/images/SHA256.png      the images' bytes, unchanged

Runs append to the store; a task that is learnt again replaces its anchors. A task's folder is complete on disk before
the manifest names it, and the manifest is replaced atomically, so that a killed run leaves the store unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inducekv_vllm.errors import ConfigError, TaskDataError
from inducekv_vllm.files.whole import lock_file

from ..runtime.files import replace_file
from .examples import Example, read_task

MANIFEST = "manifest.json"
LOCK = ".lock"  # of the run that appends


class AnchorTask(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: tuple[str, ...] = Field(min_length=1)  # the examples' task names
    run: str  # the run that appended them; appending them again changes nothing
    policy: str = "random"  # how they were chosen; earlier versions had others
    seed: int
    count: int = Field(ge=1)
    digest: str  # see `examples_digest`
    bytes: int  # of its folder's files
    replaced: bool = False  # its folder is gone; the record keeps the numbers of the folders after it


class _Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    tasks: tuple[AnchorTask, ...] = ()


@dataclass(frozen=True)
class AnchorStore:
    """The anchors under one folder; a folder that does not exist is an empty store."""

    folder: Path

    def tasks(self) -> tuple[AnchorTask, ...]:
        """Those that are there. Raises TaskDataError: the manifest cannot be read."""
        return tuple(task for task in self._records() if not task.replaced)

    def _records(self) -> tuple[AnchorTask, ...]:
        """One for each folder, in order."""
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

    def read(self, *, except_run: str | None = None, except_tasks: Collection[str] = ()) -> list[Example]:
        """All anchors in the order of the stream, checked against their digests.

        Args:
            except_run: leave out what this run has appended.
            except_tasks: leave out anchors of these tasks.

        Raises:
            TaskDataError: a file is missing, damaged or altered, naming it.
        """
        anchors: list[Example] = []
        for number, task in enumerate(self._records()):
            if task.replaced:
                continue
            path = self._task_folder(number) / "examples.jsonl"
            examples = read_task(path)
            if examples_digest(examples) != task.digest or len(examples) != task.count:
                raise TaskDataError(f"{path}: the anchors do not match their digest: damaged or altered")
            if task.run != except_run:
                anchors += [example for example in examples if example.task not in except_tasks]
        return anchors

    def bytes(self) -> int:
        """Of all tasks' files."""
        return sum(task.bytes for task in self.tasks())

    def require_new(self, tasks: Collection[str], run: str, *, replace: bool = False) -> None:
        """Raises ConfigError: another run has appended anchors of one of the tasks, and they cannot be replaced."""
        for stored in self.tasks():
            for name in sorted(set(tasks) & set(stored.tasks)):
                if stored.run != run and not replace:
                    raise ConfigError(
                        f"{self.folder} already has anchors of the task {name!r}, made by another run; --replace puts "
                        "this run's in their place, and another folder begins another stream"
                    )
                if stored.run != run and not set(stored.tasks) <= set(tasks):
                    raise ConfigError(
                        f"{self.folder} has anchors of the task {name!r} together with those of other tasks "
                        f"({', '.join(stored.tasks)}): they can only be replaced together"
                    )

    def append(self, examples: Sequence[Example], *, run: str, seed: int, replace: bool = False) -> None:
        """Append one task's anchors, durably, unless this run has already done so. Another run's append is waited for.

        Args:
            replace: remove those that other runs have appended of this task.

        Raises:
            ConfigError: another run has appended anchors of this task, or the files cannot be written.
        """
        with self._alone():
            self._append(examples, run, seed, replace)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, no other run appends: it would take the same number for its folder. Raises ConfigError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_file(self.folder / LOCK, wait=True)
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot write the anchors: {error}") from error
        if lock is None:
            raise ConfigError(f"{self.folder}: cannot write the anchors: {LOCK} cannot be locked")
        try:
            yield
        finally:
            os.close(lock)

    def _append(self, examples: Sequence[Example], run: str, seed: int, replace: bool) -> None:
        tasks = self._records()
        if any(task.run == run for task in tasks):
            self._remove_replaced(tasks)
            return
        names = {example.task for example in examples}
        self.require_new(names, run, replace=replace)
        folder = self._task_folder(len(tasks))
        try:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it wrote the manifest
            size = _write_examples(folder, examples)
            added = AnchorTask(
                tasks=tuple(sorted(names)),
                run=run,
                seed=seed,
                count=len(examples),
                digest=examples_digest(examples),
                bytes=size,
            )
            earlier = tuple(
                task.model_copy(update={"replaced": True}) if names & {*task.tasks} else task for task in tasks
            )
            manifest = _Manifest(tasks=(*earlier, added)).model_dump_json(indent=1)
            replace_file(self.folder / MANIFEST, manifest.encode())
            self._remove_replaced(earlier)
        except OSError as error:
            if len(self._records()) == len(tasks):
                shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"{self.folder}: cannot write the anchors: {error}") from error

    def _remove_replaced(self, records: Sequence[AnchorTask]) -> None:
        for number, task in enumerate(records):
            if task.replaced:
                shutil.rmtree(self._task_folder(number), ignore_errors=True)

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
