"""The text of a document: text and Markdown as they are, HTML and PDF through readers of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from inducekv_vllm.errors import ConfigError, TaskDataError

from ..data.document import Document

MAX_BYTES: Final = 4 * 2**20  # of a file with text; a book has 1 MB
MAX_PDF_BYTES: Final = 64 * 2**20
MARKDOWN: Final = (".md", ".markdown")  # whose pictures are read
PICTURES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
INSTALL: Final = 'pip install "inducekv[documents]"'


def read_documents(path: Path, name: str | None = None) -> list[Document]:
    """One file, or those of a folder in the order of their names; hidden ones and pictures are passed over.

    Args:
        name: of the one document; a file's is its own.

    Raises:
        TaskDataError, ConfigError: see `read_document`; the folder has no files, or has several and they have one name.
    """
    if not path.is_dir():
        return [document_of(path, name or path.stem)]
    seen = (each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
    files = sorted(each for each in seen if each.suffix.lower() not in PICTURES)
    if not files:
        raise TaskDataError(f"{path}: expected documents, found none in the folder")
    if name is not None:
        raise ConfigError(f"{path}: each document of a folder has its file's name, found the name {name!r}")
    return [document_of(file, file.stem) for file in files]


def document_of(path: Path, name: str) -> Document:
    """Of one file. Raises as `read_document` does."""
    return Document(name, read_document(path), path.parent if path.suffix.lower() in MARKDOWN else None)


def read_document(path: Path) -> str:
    """The text of a file, by its ending; what is none of .html, .htm and .pdf is plain text.

    Raises:
        TaskDataError: the file is missing, too large, damaged, no text in UTF-8, or has no text.
        ConfigError: what reads files of this kind is not installed.
    """
    kind = path.suffix.lower()
    most = MAX_PDF_BYTES if kind == ".pdf" else MAX_BYTES
    try:
        size = path.stat().st_size
        if size > most:
            raise TaskDataError(
                f"{path}: the document has {size} bytes, expected {most} at most: give it in parts, a bundle each"
            )
        text = READERS.get(kind, _plain)(path)
    except OSError as error:
        raise TaskDataError(f"{path}: cannot read the document: {error.strerror or error}") from error
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs the package {error.name}: {INSTALL}") from error
    if len(text.encode()) > MAX_BYTES:
        raise TaskDataError(f"{path}: the document's text has more than {MAX_BYTES} bytes: give it in parts")
    if not text.strip():
        pictures = ": its pages are pictures; recognise their text first (OCR)" if kind == ".pdf" else ""
        raise TaskDataError(f"{path}: the document has no text{pictures}")
    return text


def _plain(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskDataError(f"{path}: expected text in UTF-8, found another byte at {error.start}") from error
    if "\0" in text:
        raise TaskDataError(f"{path}: expected text, found NUL bytes")
    return text.replace("\r\n", "\n").replace("\f", "\n\n")


def _html(path: Path) -> str:
    from inscriptis import get_text

    source = _plain(path)
    return get_text(source) if source.strip() else ""


def _pdf(path: Path) -> str:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(path).pages)
    except OSError:
        raise
    except Exception as error:  # a damaged file leads pypdf to many kinds
        known = isinstance(error, PyPdfError)
        raise TaskDataError(f"{path}: not a readable PDF: {error if known else type(error).__name__}") from error


READERS: Final[Mapping[str, Callable[[Path], str]]] = MappingProxyType({".html": _html, ".htm": _html, ".pdf": _pdf})
