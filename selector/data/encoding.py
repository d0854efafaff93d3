"""The encoding of a text file: UTF-8, or what the mark at its beginning says, as Excel and Notepad write it."""

from __future__ import annotations

import codecs
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.regular import open_regular

_CHUNK: Final = 2**16
_MARKS: Final = {  # UTF-32's begins as UTF-16's does
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@contextmanager
def in_utf8(file: BinaryIO, source: Path) -> Iterator[BinaryIO]:
    """The file from its beginning, or a copy in UTF-8 while the context lasts.

    Raises:
        TaskDataError: it is of another encoding than its mark says, or of UTF-16 without a mark.
    """
    begin = file.read(_CHUNK)
    file.seek(0)
    encoding = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), None)
    if encoding is None:
        if (found := _unmarked(begin)) is not None:
            raise TaskDataError(f"{source}: the text is {found} without a mark that says so: save it in UTF-8")
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        try:
            with io.TextIOWrapper(file, encoding, newline="") as text:
                while piece := text.read(_CHUNK):
                    copy.write(piece.encode())
        except UnicodeError as error:
            raise TaskDataError(f"{source}: not {encoding} text, which its mark says: {error}") from error
        copy.seek(0)
        yield copy


def _unmarked(begin: bytes) -> str | None:
    """Which UTF-16 it is, by the zeros in every other byte of Latin text; None for neither."""
    for name, bytes_of in (("UTF-16LE", begin[1::2]), ("UTF-16BE", begin[::2])):
        if bytes_of.count(0) > len(bytes_of) / 2:
            return name
    return None


def read_text(path: Path, what: str) -> str:
    """All of a file of text.

    Raises:
        TaskDataError: it cannot be read, or its encoding is not known; `what` it is.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file, in_utf8(file, path) as text:
            return text.read().decode("utf-8-sig")
    except OSError as error:
        raise TaskDataError(f"{path}: cannot read {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskDataError(f"{path}: {what}: not text in UTF-8: {error.reason} at byte {error.start}") from error
