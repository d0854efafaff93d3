"""Items as task data: the records of a JSONL file, and the examples that are read from one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.real.items import Item
from selector.data.examples import Example, read_task

BASE: Final = "base"
ROLES: Final = ("user", "assistant")


def record(item: Item, task: str, split: str, number: int) -> dict[str, Any]:
    turns = [{"role": role, "content": text} for turn in item.turns for role, text in zip(ROLES, turn, strict=True)]
    return {
        "id": f"{task}/{split}_{number:05d}",
        "task": task,
        "concepts": list(item.concepts),
        "messages": [*turns, {"role": "user", "content": item.question}],
        "answer": item.answer,
    }


def write_split(path: Path, items: Sequence[Item], task: str) -> None:
    """Writes the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record(item, task, path.stem, number)) + "\n" for number, item in enumerate(items)]
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, path)


def examples_of(items: Sequence[Item], task: str, split: str) -> list[Example]:
    """As they are read from a file of `write_split`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{split}.jsonl"
        write_split(path, items, task)
        return read_task(path)
