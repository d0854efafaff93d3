"""The text of a file: in UTF-8, or in what the mark at its beginning says, as Excel and Notepad write it."""

import codecs
import os
from pathlib import Path
from typing import Final

from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.regular import open_regular

_BEGIN: Final = 2**16  # bytes that are looked at for zeros
_MARKS: Final = {  # UTF-32's begins as UTF-16's does
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def decoded(data: bytes, source: Path) -> str:
    """The text of a whole file, without its mark.

    Raises:
        TaskDataError: it is of another encoding than its mark says, of UTF-16 without a mark, or not UTF-8.
    """
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), None)
    # Every other byte of Latin text in UTF-16 is zero.
    for name, bytes_of in (("UTF-16LE", data[1:_BEGIN:2]), ("UTF-16BE", data[:_BEGIN:2])):
        if encoding is None and bytes_of.count(0) > len(bytes_of) / 2:
            raise TaskDataError(f"{source}: the text is {name} without a mark that says so: save it in UTF-8")
    try:
        return data.decode(encoding or "utf-8-sig")
    except UnicodeDecodeError as error:
        if encoding is not None:
            raise TaskDataError(f"{source}: not {encoding} text, which its mark says: {error}") from error
        line, found = data.count(b"\n", 0, error.start) + 1, data[error.start : error.end]
        raise TaskDataError(f"{source}, line {line}: not UTF-8 text ({found!r}): save it in UTF-8") from error


def read_text(path: Path, what: str) -> str:
    """All of a file of text.

    Raises:
        TaskDataError: it cannot be read, or its encoding is not known; `what` it is.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return decoded(file.read(), path)
    except OSError as error:
        raise TaskDataError(f"{path}: cannot read {what}: {error.strerror}") from error
