"""The rows of task data, whatever their format: JSON lines, JSON documents, CSV, TSV, Parquet.

The format is found by the content; of text that is neither JSON nor Parquet by the header's delimiter.
"""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.regular import open_regular

from .encoding import decoded
from .tables import table_rows

Row = tuple[str, dict[str, Any] | TaskDataError]  # where it is, for messages, and its values, or what is wrong with it
Format = Literal["table", "values", "lines"]
MAX_FILE_BYTES: Final = 4 * 2**30  # all of a task's text is held in memory
_VALUE: Final = re.compile(r"[^ \t\r\n]")  # its first letter
_DECODER: Final = json.JSONDecoder()
_PARQUET: Final = b"PAR1"
_ARCHIVES: Final = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"\x1f\x8b")  # .xlsx and other ZIP files, .xls, gzip


def rows_of(source: Path) -> Iterator[Row]:
    """The rows one after the other.

    Raises:
        TaskDataError: the file cannot be read at all, or not beyond a row: it names the file and the place.
    """
    try:
        data = _read(source)
    except OSError as error:
        raise TaskDataError(f"{source}: cannot read the task data: {error.strerror}") from error
    if data == _PARQUET:
        yield from _column_rows(source)
    else:
        yield from _text_rows(decoded(data, source), source)


def _read(source: Path) -> bytes:
    """All of a file; of Parquet the beginning alone."""
    try:
        descriptor = open_regular(source)
    except ValueError as error:
        raise TaskDataError(f"{str(source)!r}: not the name of a file: {error}") from error
    with os.fdopen(descriptor, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_FILE_BYTES:
            raise TaskDataError(
                f"{source}: the file has {size} bytes, a task's may have {MAX_FILE_BYTES}: draw a sample of it"
            )
        begin = file.read(len(_PARQUET))
        if begin.startswith(_ARCHIVES):
            raise TaskDataError(f"{source}: an Excel file or another archive: save the table as CSV")
        return begin if begin == _PARQUET else begin + file.read()


def _text_rows(text: str, source: Path) -> Iterator[Row]:
    match _format_of(text.lstrip(), source):
        case "table":
            yield from table_rows(text, source)
        case "lines":
            yield from _jsonl_rows(text, source)
        case "values":
            yield from _item_rows(_values(text, source), source)


def _format_of(text: str, source: Path) -> Format:
    """The format of a text, without the space before it."""
    if source.suffix.lower() in (".csv", ".tsv"):
        return "table"
    if text.startswith("[") or (text.startswith("{") and _goes_on(text)):
        return "values"
    if source.suffix == ".json" and text and not text.startswith("{"):
        raise TaskDataError(f"{source}: expected a JSON array of examples, found {text[:20]!r:.20}")
    if source.suffix == ".jsonl" or text.startswith(("{", '"')) or not text:
        return "lines"
    return "table"


def _goes_on(text: str) -> bool:
    """Whether the JSON value that a text begins with goes on behind the first line's end."""
    line, end, _ = text.partition("\n")
    line = line.rstrip()
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return bool(end) and error.pos >= len(line)
    except (ValueError, RecursionError):
        return False
    return False


def given_rows(data: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Rows in memory: mappings, or what is an example already; of a `datasets.Dataset` with its labels' names."""
    features = getattr(data, "features", None)
    names = {
        column: list(feature.names)
        for column, feature in (features.items() if isinstance(features, Mapping) else ())
        if hasattr(feature, "names")
    }
    for number, row in enumerate(data, start=1):
        place = f"row {number}"
        yield place, _with_names(row, names, place) if names else row


# ---- JSON --------------------------------------------------------------------------------------------------------


def _jsonl_rows(text: str, source: Path) -> Iterator[Row]:
    # Not `splitlines`: JSON strings may contain U+2028 and the like.
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{source}, line {number}"
        if not line.strip():
            continue
        if number == 1 and not line.lstrip().startswith(("{", "[", '"')):
            raise TaskDataError(f"{place}: expected JSON lines, one object on each, found {line!r:.60}")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield place, TaskDataError(f"{place}: malformed JSON: {error}")
        else:
            yield place, _checked(value, place)


def _item_rows(items: Iterable[Any], source: Path) -> Iterator[Row]:
    for number, item in enumerate(items, start=1):
        place = f"{source}, item {number}"
        yield place, _checked(item, place)


def _values(text: str, source: Path) -> Iterator[Any]:
    """JSON values one after the other, each over as many lines as it takes, or the items of one array."""
    at = 0
    for number in itertools.count(1):
        if (begin := _VALUE.search(text, at)) is None:
            return
        try:
            value, at = _DECODER.raw_decode(text, begin.start())
        except (ValueError, RecursionError) as error:
            raise TaskDataError(f"{source}, item {number}: malformed JSON: {error}") from error
        yield from value if isinstance(value, list) else (value,)


def _checked(value: Any, place: str) -> dict[str, Any] | TaskDataError:
    """A JSON object of strings that can be encoded.

    JSON can name a half of a surrogate pair alone; no tokenizer and no file system takes it.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        return TaskDataError(f"{place}: a string holds half of a surrogate pair: {found!r}")
    except (ValueError, RecursionError) as error:
        return TaskDataError(f"{place}: malformed JSON: {error}")
    if not isinstance(value, dict):
        return TaskDataError(f"{place}: expected a JSON object, found {type(value).__name__}")
    return value


# ---- Parquet, and the labels of Hugging Face's datasets ----------------------------------------------------------


def _column_rows(path: Path) -> Iterator[Row]:
    """Of a file of Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TaskDataError(f"{path}: Parquet needs pyarrow: pip install 'inducekv[data]'") from error
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
            names = _class_names(batch.schema, path)
            for row in batch.to_pylist():
                number += 1
                place = f"{path}, row {number}"
                yield place, _with_names(row, names, place) if names else row
    except pyarrow.ArrowException as error:
        raise TaskDataError(f"{path}, row {number + 1}: cannot be read: {error!s:.200}") from error


def _class_names(schema: Any, path: Path) -> dict[str, list[str]]:
    """The names of the classes of each column of `ClassLabel`, as `datasets` has written them down for the file."""
    try:
        if (text := (schema.metadata or {}).get(b"huggingface")) is None:
            return {}
        features = json.loads(text)["info"]["features"]
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TaskDataError(f"{path}: what `datasets` has written about its columns cannot be read: {error}") from error


def _with_names(row: Mapping[str, Any], names: Mapping[str, list[str]], place: str) -> dict[str, Any] | TaskDataError:
    """The row with its classes by name; -1 is what `datasets` has for none."""
    named = dict(row)
    for column, of_class in names.items():
        number = row.get(column)
        if not isinstance(number, int) or isinstance(number, bool):
            continue
        if not -1 <= number < len(of_class):
            return TaskDataError(f"{place}: {column!r} is the class {number}, its names are {len(of_class)}")
        named[column] = None if number == -1 else of_class[number]
    return named
