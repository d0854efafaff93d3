"""JSON of unknown origin, parsed within bounds.

A file's size bounds neither the time nor the memory that its values take: 16 MiB of `[],[],...` are 400 MB of empty
lists, and seconds. So values are counted before they are parsed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any, Final

MAX_VALUES: Final = 2**16  # members of lists and objects, and these

_STRING = re.compile(rb'"[^"]*+(?:"|\Z)')
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


class TooManyValues(ValueError):
    """The JSON holds more than it may."""


def parse_json(text: bytes, most: int = MAX_VALUES) -> Any:
    """Parse JSON in UTF-8 of at most so many values.

    Raises:
        ValueError: it is none, or it nests too deeply.
        TooManyValues: a ValueError of its own.
    """
    require_few_values(text, most)
    try:
        return json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def require_few_values(text: bytes, most: int = MAX_VALUES) -> None:
    """Raises TooManyValues."""
    if count_values(text, most) > most:
        raise TooManyValues(f"it holds more than {most} values")


def count_values(text: bytes, most: int = MAX_VALUES) -> int:
    """An upper bound of the values in JSON, or in the beginning of one; above `most` only if they are as many."""
    count = _marks(text)
    return count if count <= most else _marks(_without_strings(text, most))


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b",")


def _without_strings(text: bytes, most: int) -> bytes:
    """Brackets and commas in strings are no values."""
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if text.count(b'"') > 4 * most + 4:  # two for a key, two for its value: more than that are too many anyway
        return text
    return _STRING.sub(b"", text)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Make many small values, of which there is a bound and no cycle, without a look for cycles.

    Python's collector looks at all objects of the process each time that it has counted enough new ones. In a large
    process that takes most of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def shown(value: Any) -> str:
    """A parsed value for a message: its beginning, in printable characters."""
    return _SHORT.repr(value)
