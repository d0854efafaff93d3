"""The columns of one row, by the names that are known, and which of them were read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from reprlib import repr as shown
from typing import Any, Final

from inducekv_vllm.errors import TaskDataError

PROMPTS: Final = ("prompt", "question", "query", "instruction")
ANSWERS: Final = ("answer", "completion", "response", "output", "label", "target")
IMAGES: Final = ("image", "images", "image_path")
_OTHERS: Final = ("id", "task", "messages", "conversations", "system", "input", "context", "answers", "also")
_KNOWN: Final = frozenset((*PROMPTS, *ANSWERS, *IMAGES, *_OTHERS, "chosen", "rejected"))


@dataclass(frozen=True)
class Columns:
    """Which columns hold what, where it is not to be found by their names."""

    prompt: str | None = None
    answer: str | None = None
    image: str | None = None
    task: str | None = None  # the task's name, of rows that have none
    optional: bool = False  # columns that are not there are found by their names

    def named(self) -> tuple[str, ...]:
        """The names of columns that were given."""
        return tuple(name for name in (self.prompt, self.answer, self.image) if name is not None)

    def of_others(self) -> Columns:
        """For data beside the task's, which may have the same columns."""
        return replace(self, task=None, optional=True)

    def there(self, names: Collection[str]) -> Columns:
        """Without columns that are optional and not among these."""
        gone: dict[str, Any] = {
            each: None for each in ("prompt", "answer", "image") if getattr(self, each) not in names
        }
        return replace(self, **gone) if self.optional else self


BY_NAME: Final = Columns()


class Row:
    """A row's values by column. A known name counts in capitals, too ("Question"); NaN is no value."""

    def __init__(self, values: Mapping[str, Any], given: Collection[str], place: str) -> None:
        """`given`: names that count as they are written."""
        self.place = place
        self._values: dict[str, Any] = {}
        self._written: dict[str, str] = {}  # as the file has the name
        self._read: set[str] = set()
        for name in map(str, values):
            known = name.strip().casefold()
            if name in given or known not in _KNOWN or known in values or known in self._values:
                known = name
            value = values[name]
            self._values[known] = None if isinstance(value, float) and math.isnan(value) else value
            self._written[known] = name

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """The value, which is thereby used; None without one."""
        self._read.add(name)
        return self._values.get(name)

    def look(self, name: str) -> Any:
        """The value, which is not used by that."""
        return self._values.get(name)

    def is_header(self) -> bool:
        """Whether its values are names of columns, and nothing else: a second header, below the first table."""
        names = {_as_name(name) for name in self._written.values()}
        found = [value for value in self._values.values() if not is_empty(value)]
        return len(found) > 1 and all(isinstance(value, str) and _as_name(value) in names for value in found)

    def unused(self) -> list[str]:
        """The columns that hold something and were not read, as the file has their names."""
        return [
            self._written[name]
            for name, value in self._values.items()
            if name not in self._read and not is_empty(value)
        ]

    def text(self, name: str) -> str:
        """A text, or a number as one: a whole number without a decimal point. Raises TaskDataError: anything else."""
        value = self.get(self._existing(name))
        if isinstance(value, Integral) and not isinstance(value, bool):
            return str(int(value))
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(number := float(value)):
            # Integers are floats in a column with gaps.
            return str(int(number)) if number.is_integer() and abs(number) < 2**53 else str(number)
        if not isinstance(value, str) or not value.strip():
            raise TaskDataError(f"{self.place}: {self._written[name]!r} must be a text, found {shown(value)}")
        return value

    def only(self, names: Sequence[str], what: str) -> str:
        """The one of these columns that the row has. Raises TaskDataError: it has none, or several."""
        found = [name for name in names if name in self]
        if len(found) == 1:
            return found[0]
        problem = f"the columns {', '.join(found)} could all be the {what}" if found else f"no column is the {what}"
        raise TaskDataError(
            f"{self.place}: {problem}: name it with --columns {what}=NAME; there are {self._all()}{self._hint()}"
        )

    def images(self, name: str) -> list[Any]:
        """Paths of pictures. Raises TaskDataError: there is no such column, or pictures lie in the file itself."""
        value = self.get(name if name in IMAGES else self._existing(name))
        found = list(value) if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]
        if any(isinstance(each, dict | bytes) for each in found):
            raise TaskDataError(
                f"{self.place}: {name!r} holds pictures, not paths: write them to files beside this one, and their "
                "paths here"
            )
        return found

    def _existing(self, name: str) -> str:
        if name not in self:
            raise TaskDataError(f"{self.place}: there is no column {name!r}, there are {self._all()}")
        return name

    def _all(self) -> str:
        return ", ".join(self._written.values())

    def _hint(self) -> str:
        """Where the rows may be, if this is none."""
        lists = [
            self._written[name]
            for name, value in self._values.items()
            if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
        ]
        return f"; if the rows are the list in {lists[0]!r}, write that list to a file of its own" if lists else ""


def _as_name(text: str) -> str:
    return text.strip('\ufeff" ').casefold()


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)
