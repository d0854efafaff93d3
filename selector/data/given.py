"""Task data as a program gives it: a file in any format, or rows in memory."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .examples import Example, examples_of, read_task
from .records import BY_NAME, Columns
from .rows import given_rows

Data = str | Path | Iterable[Mapping[str, Any] | Example]


def read(data: Data, task: str | None = None, columns: Columns = BY_NAME) -> list[Example]:
    """Examples of a file or of rows. Raises TaskDataError: a row is wrong, or an id occurs twice."""
    columns = replace(columns, task=task or columns.task)
    if isinstance(data, str | Path):
        return read_task(data, columns)
    rows = list(given_rows(data))
    return examples_of(rows, Path(), columns, "task", "the rows") if rows else []
