"""What can be imported, as it is before the model is there."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backbone.model import Backbone
from .prefix import Prefix


@dataclass(frozen=True)
class Source:
    """A source that was read, and checked as far as that goes without the model."""

    digest: str  # sha256 of its files
    settings: dict[str, Any]  # what a bundle records of it
    prefix: Callable[[Backbone], Prefix]  # raises BundleError or TaskDataError: it does not fit the model
    base: str = ""  # the model that it was trained with, if it says so


def sha256_of(path: Path) -> str:
    """Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
