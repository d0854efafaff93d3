"""The anchor store: examples of past tasks, kept apart from bundles and used by the selector alone.

    DIR/manifest.json               one record for each task, in the order of the stream
    DIR/0000/examples.jsonl         task data, as `selector.data.examples.read_task` reads it
    DIR/0000/images/SHA256.png      the images' bytes, unchanged

Anchors of a task take the place of those that the store has of it, and come last. A task's folder is complete on disk
before the manifest names it, and the manifest is replaced atomically, so that a killed run leaves the store unchanged.
"""

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
FIRST = "0000"  # folder of a task


class AnchorTask(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: tuple[str, ...] = Field(min_length=1)  # the examples' task names
    number: int = Field(ge=0)  # of its folder
    count: int = Field(ge=1)
    digest: str  # see `examples_digest`
    bytes: int  # of its folder's files


class _Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[2] = 2
    tasks: tuple[AnchorTask, ...] = ()


@dataclass(frozen=True)
class AnchorStore:
    """The anchors under one folder; a folder that does not exist is an empty store."""

    folder: Path

    def tasks(self) -> tuple[AnchorTask, ...]:
        """Raises TaskDataError: the manifest cannot be read."""
        path = self.folder / MANIFEST
        if not path.exists():
            others = [each for each in self.folder.glob("[!.]*") if each.name != FIRST]  # which a killed run has begun
            if others or (self.folder.exists() and not self.folder.is_dir()):
                raise TaskDataError(f"{self.folder}: not an anchor store: it has no {MANIFEST}")
            return ()
        try:
            return _Manifest.model_validate_json(path.read_bytes()).tasks
        except (OSError, ValidationError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise TaskDataError(f"{path}: the manifest of the anchors cannot be read: {reason}") from error

    def read(self, *, except_tasks: Collection[str] = ()) -> list[Example]:
        """The anchors of all tasks but some, in the order of the stream, checked against their digests.

        Raises:
            TaskDataError: a file is missing, damaged or altered, naming it.
        """
        anchors: list[Example] = []
        for task in self.tasks():
            path = self._folder_of(task.number) / "examples.jsonl"
            examples = read_task(path)
            if examples_digest(examples) != task.digest or len(examples) != task.count:
                raise TaskDataError(f"{path}: the anchors do not match their digest: damaged or altered")
            anchors += [example for example in examples if example.task not in except_tasks]
        return anchors

    def bytes(self) -> int:
        """Of all tasks' files."""
        return sum(task.bytes for task in self.tasks())

    def require_together(self, tasks: Collection[str]) -> None:
        """Raises ConfigError: some of these tasks were appended with others, and would take their places, too."""
        for stored in self.tasks():
            if set(tasks) & set(stored.tasks) and not set(stored.tasks) <= set(tasks):
                raise ConfigError(
                    f"{self.folder} has anchors of the tasks {', '.join(stored.tasks)} together: they can only be "
                    "replaced together"
                )

    def append(self, examples: Sequence[Example]) -> None:
        """Append one task's anchors, durably. Another run's append is waited for.

        Raises:
            ConfigError: see `require_together`; or the files cannot be written.
        """
        with self._alone():
            self._append(examples)

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

    def _append(self, examples: Sequence[Example]) -> None:
        names = {example.task for example in examples}
        self.require_together(names)
        earlier = self.tasks()
        number = max((task.number for task in earlier), default=-1) + 1
        try:
            self._remove_strays()
            added = AnchorTask(
                tasks=tuple(sorted(names)),
                number=number,
                count=len(examples),
                digest=examples_digest(examples),
                bytes=_write_examples(self._folder_of(number), examples),
            )
            kept = (task for task in earlier if names.isdisjoint(task.tasks))
            replace_file(self.folder / MANIFEST, _Manifest(tasks=(*kept, added)).model_dump_json(indent=1).encode())
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot write the anchors: {error}") from error
        finally:
            self._remove_strays()

    def _remove_strays(self) -> None:
        """Folders that the manifest does not name: of anchors that were replaced, and of runs that were killed."""
        named = {self._folder_of(task.number) for task in self.tasks()}
        for folder in self.folder.glob("[0-9]*"):
            if folder not in named:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_of(self, number: int) -> Path:
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
