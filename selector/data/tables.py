"""Tables as text: CSV with a header, cells in double quotes where they hold the delimiter or line ends."""

import csv
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from inducekv_vllm.errors import TaskDataError

_DELIMITERS: Final = (",", "\t", ";")
_SEPARATOR: Final = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # what Excel writes above the header
_QUOTED: Final = re.compile(r'"[^"]*"')
_MARK: Final = "\ufeff"  # that a file begins with


def table_rows(text: str, source: Path) -> Iterator[tuple[str, dict[str, Any] | TaskDataError]]:
    """The rows of a table, each with its place or what is wrong with it.

    Raises:
        TaskDataError: there is no header, or the table cannot be read on.
    """
    lines = io.StringIO(text, newline="\n")
    header, above = next(lines, ""), 0
    delimiter = "\t" if source.suffix.lower() == ".tsv" else None
    if said := _SEPARATOR.fullmatch(header.strip("\r\n")):
        delimiter, header, above = said[1], next(lines, ""), 1
    if delimiter is None:
        unquoted = _QUOTED.sub("", header)
        delimiter = max(_DELIMITERS, key=unquoted.count)
    if header and delimiter not in header:
        raise TaskDataError(
            f"{source}, line {above + 1}: expected JSON, Parquet, or a table with a header of at least two columns, "
            f"found {header.strip()!r:.60}"
        )
    reader = csv.reader(itertools.chain([header] if header else [], lines), delimiter=delimiter, strict=True)
    before = csv.field_size_limit(len(text))
    try:
        columns = [name.strip() or f"column {number}" for number, name in enumerate(next(reader, []), start=1)]
        if repeated := sorted({name for name in columns if columns.count(name) > 1}):
            raise TaskDataError(f"{source}, line {above + 1}: the column {repeated[0]!r} occurs more than once")
        begin = reader.line_num + 1
        for cells in reader:
            place = f"{source}, line {above + begin}"
            begin = reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue  # spreadsheets save empty rows, too
            if cells[0].startswith(_MARK):
                raise TaskDataError(f"{place}: a byte order mark: two tables in one, keep each in a file of its own")
            if len(cells) != len(columns):
                yield place, TaskDataError(f"{place}: expected {len(columns)} cells, found {len(cells)}")
            else:
                yield place, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        why = f"not a table: {error}"
        if "new-line" in str(error):
            why = "a carriage return that ends no line: expected lines that end with LF or CR LF, or quotes around it"
        raise TaskDataError(f"{source}, line {above + reader.line_num}: {why}") from error
    finally:
        csv.field_size_limit(before)
