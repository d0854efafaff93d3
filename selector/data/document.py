"""A document to be learned in place of a task: its text, its name, and which entry stands for it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.bundle.metadata import MAX_ID, is_unicode
from inducekv_vllm.errors import TaskDataError


@dataclass(frozen=True)
class Document:
    """A text and its name, which is the title that questions mention and the task of its entry.

    Attributes:
        folder: of the pictures that a text in Markdown names, for a model that takes pictures; None: it has none.
    """

    name: str
    text: str
    folder: Path | None = None

    def __post_init__(self) -> None:
        """Raises TaskDataError: no bundle can record the name."""
        if not is_unicode(self.name):
            raise TaskDataError(f"the document's name must be Unicode, found {self.name!r}: is the file's name UTF-8?")

    @property
    def digest(self) -> str:
        """sha256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def record(self) -> EntryRecord:
        return EntryRecord(id=f"document/{self.name}"[-MAX_ID:], task=self.name, source_digest=self.digest)
