"""The rows of a file of task data, whatever its format: JSON lines, a JSON array, CSV, TSV, Parquet, a datasets folder.

The format is found by the content; of text that is neither JSON nor Parquet by the header's delimiter.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.regular import open_regular

Row = tuple[str, dict[str, Any] | TaskDataError]  # where it is, for messages, and its values, or what is wrong with it
MAX_EXAMPLE_BYTES: Final = 4 * 2**20
MAX_FILE_BYTES: Final = 4 * 2**30  # all of a task's text is held in memory
_CHUNK: Final = 2**16
_PARQUET, _ZIP = b"PAR1", b"PK\x03\x04"
_DELIMITERS: Final = (",", "\t", ";")


def rows_of(source: Path) -> Iterator[Row]:
    """The rows one after the other.

    Raises:
        TaskDataError: the file cannot be read at all, or not beyond a row: it names the file and the place.
    """
    try:
        if source.is_dir():
            yield from _folder_rows(source)
            return
        file = os.fdopen(open_regular(source), "rb")
    except OSError as error:
        raise TaskDataError(f"{source}: cannot read the task data: {error.strerror}") from error
    except ValueError as error:
        raise TaskDataError(f"{str(source)!r}: not the name of a file: {error}") from error
    with file:
        try:
            if (size := os.fstat(file.fileno()).st_size) > MAX_FILE_BYTES:
                raise TaskDataError(
                    f"{source}: the file has {size} bytes, a task's may have {MAX_FILE_BYTES}: draw a sample of it"
                )
            yield from _rows(file, source)
        except OSError as error:
            raise TaskDataError(f"{source}: cannot read the task data: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise TaskDataError(f"{source}: the task data is not UTF-8 text: {error}") from error


def _rows(file: BinaryIO, source: Path) -> Iterator[Row]:
    begin = file.read(_CHUNK)
    file.seek(0)
    text = begin.removeprefix(codecs.BOM_UTF8).lstrip()
    if begin.startswith(_PARQUET):
        yield from _parquet_rows(source)
    elif begin.startswith(_ZIP):
        raise TaskDataError(f"{source}: an Excel file or another archive: save the table as CSV")
    elif source.suffix in (".csv", ".tsv"):
        yield from _table_rows(file, source)
    elif text.startswith(b"[") or (source.suffix == ".json" and not text.startswith(b"{")):
        for number, item in enumerate(array_items(io.TextIOWrapper(file, encoding="utf-8-sig"), source), start=1):
            place = f"{source}, item {number}"
            yield place, _checked(item, place)
    elif source.suffix == ".jsonl" or text.startswith((b"{", b'"')) or not text:
        yield from _jsonl_rows(file, source)
    else:
        yield from _table_rows(file, source)


# ---- JSON --------------------------------------------------------------------------------------------------------


def _jsonl_rows(file: BinaryIO, source: Path) -> Iterator[Row]:
    # Lines of bytes end at "\n" alone, as JSON strings may contain U+2028 and the like.
    for number in itertools.count(1):
        line = file.readline(MAX_EXAMPLE_BYTES + 1)
        place = f"{source}, line {number}"
        if not line:
            return
        if len(line) > MAX_EXAMPLE_BYTES:
            raise TaskDataError(f"{place}: the line is longer than {MAX_EXAMPLE_BYTES} bytes")
        if not line.strip():
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line.lstrip().startswith((b"{", b"[", b'"')):
                raise TaskDataError(f"{place}: expected JSON lines, one object on each, found {line.decode()!r:.60}")
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            yield place, TaskDataError(f"{place}: not UTF-8 text: {error}")
        except (ValueError, RecursionError) as error:
            yield place, TaskDataError(f"{place}: malformed JSON: {error}")
        else:
            yield place, _checked(value, place)


def array_items(file: TextIO, source: Path) -> Iterator[Any]:
    """The items of a JSON array, of which never more than a few are in memory."""
    decoder = json.JSONDecoder()
    rest = _read_on("", file)
    if not rest:
        return
    if not rest.startswith("["):
        raise TaskDataError(f"{source}: expected a JSON array of examples, found {rest!r:.20}")
    rest = _read_on(rest[1:], file)
    if not rest.startswith("]"):
        for number in itertools.count(1):
            item, rest = _first_item(rest, file, decoder, f"{source}, item {number}")
            yield item
            rest = _read_on(rest, file)
            if not rest.startswith(","):
                break
            rest = _read_on(rest[1:], file)
    if not rest.startswith("]") or _read_on(rest[1:], file):
        raise TaskDataError(f"{source}: malformed JSON: expected the end of the array, found {rest!r:.20}")


def _read_on(rest: str, file: TextIO) -> str:
    """What follows after white space; empty at the end of the file."""
    while not (rest := rest.lstrip(" \t\r\n")):
        if not (rest := file.read(_CHUNK)):
            break
    return rest


def _first_item(rest: str, file: TextIO, decoder: json.JSONDecoder, place: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and what follows it; reads on while it is not complete."""
    while True:
        try:
            item, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            more = file.read(max(len(rest), _CHUNK))
            if len(rest) > MAX_EXAMPLE_BYTES:
                raise TaskDataError(f"{place}: malformed JSON, or longer than {MAX_EXAMPLE_BYTES} bytes") from error
            if not more:
                raise TaskDataError(f"{place}: malformed JSON: {error}") from error
            rest += more
        else:
            return item, rest[end:]


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


# ---- Tables ------------------------------------------------------------------------------------------------------


def _table_rows(file: BinaryIO, source: Path) -> Iterator[Row]:
    """CSV with a header, cells in double quotes where they hold the delimiter or line ends."""
    lines = _decoded_lines(file, source)
    header = next(lines, "")
    counts = {delimiter: header.count(delimiter) for delimiter in _DELIMITERS}
    delimiter = "\t" if source.suffix == ".tsv" else max(counts, key=lambda each: counts[each])
    if header and not counts[delimiter]:
        raise TaskDataError(
            f"{source}, line 1: expected JSON, Parquet, or a table with a header of at least two columns, "
            f"found {header.strip()!r:.60}"
        )
    reader = csv.reader(itertools.chain([header] if header else [], lines), delimiter=delimiter, strict=True)
    before = csv.field_size_limit(MAX_EXAMPLE_BYTES)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if repeated := sorted({name for name in columns if columns.count(name) > 1}):
            raise TaskDataError(f"{source}, line 1: the column {repeated[0]!r} occurs more than once")
        begin = reader.line_num + 1
        for cells in reader:
            place = f"{source}, line {begin}"
            begin = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(columns):
                yield place, TaskDataError(f"{place}: expected {len(columns)} cells, found {len(cells)}")
            else:
                yield place, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise TaskDataError(f"{source}, line {reader.line_num}: not a table: {error}") from error
    finally:
        csv.field_size_limit(before)


def _decoded_lines(file: BinaryIO, source: Path) -> Iterator[str]:
    for number in itertools.count(1):
        if not (line := file.readline(MAX_EXAMPLE_BYTES + 1)):
            return
        if len(line) > MAX_EXAMPLE_BYTES:
            raise TaskDataError(f"{source}, line {number}: the line is longer than {MAX_EXAMPLE_BYTES} bytes")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            found = line[error.start : error.end]
            raise TaskDataError(
                f"{source}, line {number}: not UTF-8 text ({found!r}): save the table in UTF-8"
            ) from error


# ---- Parquet and Hugging Face datasets ---------------------------------------------------------------------------


def _folder_rows(folder: Path) -> Iterator[Row]:
    """What `datasets` has saved to disk, or the Parquet files of one split, beneath a folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise TaskDataError(f"{folder}: a dataset of several splits: name one of them, {', '.join(splits)}")
    parquet, arrow = sorted(folder.rglob("*.parquet")), sorted(folder.glob("*.arrow"))
    if len(splits := sorted({path.name.split("-")[0] for path in parquet})) > 1:
        raise TaskDataError(f"{folder}: Parquet files of several splits ({', '.join(splits)}): name one file")
    if not parquet and not arrow:
        raise TaskDataError(f"{folder}: expected a file, or a folder that `datasets` has saved, found neither")
    for path in parquet or arrow:
        yield from _parquet_rows(path) if parquet else _arrow_rows(path)


def _parquet_rows(path: Path) -> Iterator[Row]:
    yield from _batch_rows(path, lambda arrow: arrow.parquet.ParquetFile(path).iter_batches(1024))


def _arrow_rows(path: Path) -> Iterator[Row]:
    yield from _batch_rows(path, lambda arrow: arrow.ipc.open_stream(path))


def _batch_rows(path: Path, batches: Any) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise TaskDataError(f"{path}: Parquet and datasets need pyarrow: pip install 'inducekv[data]'") from error
    number = 0
    try:
        for batch in batches(pyarrow):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except pyarrow.ArrowException as error:
        raise TaskDataError(f"{path}, row {number + 1}: cannot be read: {error!s:.200}") from error
