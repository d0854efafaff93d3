"""A run's progress on disk: a run that is killed resumes, and ends with the same result.

DIR/identity.json       everything that determines the run's result, and when it began
DIR/NAME.safetensors    an optimisation's state after its last complete step
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
from torch import Tensor

from inducekv_vllm.errors import ConfigError

from .files import replace_file

IDENTITY: Final = "identity.json"


@dataclass(frozen=True)
class Checkpoint:
    """The folder of one run."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any]) -> tuple[Checkpoint, bool]:
        """The run's own progress, or none: another run's progress in the folder is removed.

        Args:
            identity: JSON values that determine the run's result.

        Returns:
            The checkpoint, and whether it holds progress of this run.

        Raises:
            ConfigError: the folder cannot be written.
        """
        path = folder / IDENTITY
        try:
            resumed = path.is_file() and _is_of(path, identity)
            if not resumed:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                replace_file(path, _content(identity, datetime.now(UTC).replace(microsecond=0)))
        except OSError as error:
            raise ConfigError(f"{folder}: cannot keep the progress here: {error}") from error
        return cls(folder), resumed

    @property
    def began(self) -> datetime:
        """When the run began, in UTC and in whole seconds: resuming it or copying the folder changes nothing."""
        return datetime.fromisoformat(json.loads((self.folder / IDENTITY).read_bytes())["began"])

    def write(self, name: str, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Replace what is stored under `name`, atomically.

        Args:
            progress: JSON values.

        Raises:
            ConfigError: the file cannot be written; the previous one stays.
        """
        data = safetensors.torch.save(tensors, metadata={"progress": json.dumps(progress)})
        try:
            replace_file(self._path(name), data)
        except OSError as error:
            raise ConfigError(f"{self._path(name)}: cannot write the progress: {error}") from error

    def read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and JSON values stored under `name`, if any.

        Raises:
            ConfigError: the file is damaged.
        """
        path = self._path(name)
        if not path.exists():
            return None
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                names, progress = list(file.keys()), json.loads(file.metadata()["progress"])
                return {name: file.get_tensor(name) for name in names}, progress
        except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise self.damaged(name, error) from error

    def remove_unless_begun(self) -> None:
        """Remove a folder that holds the run's identity alone."""
        if [path.name for path in self.folder.iterdir()] == [IDENTITY]:
            shutil.rmtree(self.folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def damaged(self, name: str, error: Exception | str) -> ConfigError:
        """The error for an unusable file of `name`."""
        return ConfigError(f"{self._path(name)}: the progress is damaged, remove the folder to start again: {error}")

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _content(identity: dict[str, Any], began: datetime) -> bytes:
    return json.dumps({"began": began.isoformat(), "identity": identity}, sort_keys=True, indent=1).encode()


def _is_of(path: Path, identity: dict[str, Any]) -> bool:
    """Whether a file is what `_content` made of this identity, whenever that was."""
    content = path.read_bytes()
    try:
        began = datetime.fromisoformat(json.loads(content)["began"])
    except (ValueError, KeyError, TypeError):
        return False
    return content == _content(identity, began)
