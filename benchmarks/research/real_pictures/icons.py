"""Emoji as several vendors draw them: SVG from the npm packages `@iconify-json/NAME`, installed by name into the cache.

The packages are installed once, with npm, at the releases named here. Their text is data: nothing of theirs is run.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.real.model import cache_folder
from inducekv_vllm.errors import ConfigError

FOLDER: Final = "icons"  # in the cache
Role = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class IconPackage:
    """One release of one vendor's drawings; `partial`: it need not have every concept."""

    name: str
    version: str
    vendor: str
    licence: str
    role: Role
    partial: bool = False

    @property
    def requirement(self) -> str:
        return f"@iconify-json/{self.name}@{self.version}"


PACKAGES: Final = (
    IconPackage("noto", "1.2.9", "Google", "Apache-2.0", "train"),
    IconPackage("noto-v1", "1.2.5", "Google", "Apache-2.0", "train"),
    IconPackage("fluent-emoji-flat", "1.2.6", "Microsoft", "MIT", "train"),
    IconPackage("openmoji", "1.2.29", "OpenMoji", "CC-BY-SA-4.0", "train"),
    IconPackage("fxemoji", "1.2.2", "Mozilla", "Apache-2.0", "train", partial=True),
    IconPackage("emojione", "1.2.3", "EmojiOne", "CC-BY-4.0", "validation"),
    IconPackage("emojione-v1", "1.2.3", "EmojiOne", "CC-BY-SA-4.0", "validation", partial=True),
    IconPackage("twemoji", "1.2.5", "Twitter", "CC-BY-4.0", "test"),
)


class Icons:
    """The drawings of one package: names, what category each is of, and each as SVG."""

    def __init__(self, package: IconPackage, icons: Mapping[str, Any], categories: Mapping[str, list[str]]) -> None:
        self.package = package
        self._icons = icons
        self.categories = categories

    @classmethod
    def read(cls, package: IconPackage, cache: Path) -> Icons:
        """From the cache's folder. Raises ConfigError: the package is not there, or of another release or form."""
        folder = _folder(package, cache)
        try:
            version = json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"]
            icons = json.loads((folder / "icons.json").read_text(encoding="utf-8"))
            categories = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["categories"]
        except FileNotFoundError as error:
            raise ConfigError(f"the npm package {package.requirement} is not installed: {how_to(cache)}") from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{folder} does not hold what is read from it: {error!r}") from error
        if version != package.version:
            raise ConfigError(f"{folder} holds version {version}, expected {package.version}: {how_to(cache)}")
        return cls(package, icons, categories)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self._icons["icons"])

    def svg(self, name: str) -> str:
        icon = self._icons["icons"][name]
        width, height = (icon.get(side, self._icons.get(side, 16)) for side in ("width", "height"))  # Iconify's default
        left, top = icon.get("left", 0), icon.get("top", 0)
        box = f"{left} {top} {width} {height}"
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{icon["body"]}</svg>'


def how_to(cache: Path) -> str:
    requirements = " ".join(package.requirement for package in PACKAGES)
    return f"install it with `npm install --ignore-scripts --prefix {cache / FOLDER} {requirements}`"


def install(cache: Path | None = None) -> None:
    """Installs what is missing in the cache. Raises ConfigError: there is no npm, or it fails."""
    cache = cache or cache_folder()
    if all(_is_there(package, cache) for package in PACKAGES):
        return
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(f"npm is not installed, and the pictures come with npm packages: {how_to(cache)}")
    try:
        (cache / FOLDER).mkdir(parents=True, exist_ok=True)
        for package in PACKAGES:
            if not _is_there(package, cache):  # npm takes half a package of the right version for a whole one
                shutil.rmtree(_folder(package, cache), ignore_errors=True)
        (cache / FOLDER / "node_modules" / ".package-lock.json").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{cache / FOLDER}: cannot write the pictures' packages: {error}") from error
    requirements = [package.requirement for package in PACKAGES]
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(cache / FOLDER)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"npm could not install the pictures: {done.stderr.strip()[-500:]}; {how_to(cache)}")


def _folder(package: IconPackage, cache: Path) -> Path:
    return cache / FOLDER / "node_modules" / "@iconify-json" / package.name


def _is_there(package: IconPackage, cache: Path) -> bool:
    try:
        Icons.read(package, cache)
    except ConfigError:
        return False
    return True


@functools.cache
def read_all(cache: Path) -> tuple[Icons, ...]:
    """Of every package, in the order of `PACKAGES`. Raises ConfigError: see `Icons.read`."""
    return tuple(Icons.read(package, cache) for package in PACKAGES)
