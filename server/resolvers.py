"""Where bundles that nobody has loaded are found by name: `--memory-resolver URI`.

A folder, or whatever fsspec reads (`s3://`, `gs://`, `hf://`, by their own packages): the bundle NAME is the file
`URI/NAME.safetensors`. A package may bring others: its entry point in the group `inducekv.resolvers`, named after the
scheme of its URIs, is called with the URI and returns a `MemoryResolver`.
"""

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol, cast

from inducekv_vllm.errors import ConfigError

GROUP: Final = "inducekv.resolvers"
SUFFIX: Final = ".safetensors"


class MemoryResolver(Protocol):
    """Finds bundles by name. Both methods run in a thread that may hang, and several at once."""

    def tag(self, name: str) -> str | None:
        """What changes whenever the bundle of this name does: it is asked often. None: there is no such bundle.

        Raises:
            Exception: nobody knows at this moment; the message is logged.
        """
        ...

    def fetch(self, name: str, copy: Path) -> Path:
        """A file with the bundle: its own, which stays, or `copy`, which it has written. Raises as `tag`."""
        ...


class FolderResolver:
    """Bundles in a folder of this machine, or one that is mounted. It fetches nothing."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: there is no such folder."""
        if not folder.is_dir():
            raise ConfigError(f"--memory-resolver: no such folder: {folder}")
        self._folder = folder.resolve()

    def tag(self, name: str) -> str | None:
        """As `MemoryResolver.tag`: a file that was replaced has another inode, one that was written to another time."""
        try:
            found = self._path(name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"

    def fetch(self, name: str, copy: Path) -> Path:
        """As `MemoryResolver.fetch`. Raises PermissionError: a link leads out of the folder."""
        path = self._path(name).resolve()
        if not path.is_relative_to(self._folder):
            raise PermissionError(f"{self._path(name)} leads out of the folder")
        return path

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"


class FsspecResolver:
    """Bundles in an object store."""

    def __init__(self, uri: str) -> None:
        """Raises ConfigError: fsspec does not know the scheme, or its package is not installed."""
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        try:
            self._files, self._root = cast(tuple[Any, str], url_to_fs(uri, use_listings_cache=False))
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"--memory-resolver {uri}: {error}") from error

    def tag(self, name: str) -> str | None:
        """As `MemoryResolver.tag`: what the store says of the object, its ETag or time among it."""
        try:
            return str(self._files.ukey(self._path(name)))
        except FileNotFoundError:
            return None

    def fetch(self, name: str, copy: Path) -> Path:
        self._files.get_file(self._path(name), str(copy))
        return copy

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}{SUFFIX}"


def resolver_of(uri: str) -> MemoryResolver:
    """Raises ConfigError: it cannot be used, or its scheme is unknown."""
    scheme, separator, path = uri.partition("://")
    if not separator or scheme == "file":
        return FolderResolver(Path(os.path.expanduser(path if separator else uri)))
    if found := tuple(entry_points(group=GROUP, name=scheme)):
        return cast(MemoryResolver, found[0].load()(uri))
    return FsspecResolver(uri)


def can_be_resolved(name: str) -> bool:
    """Whether a name is that of a file beneath a folder."""
    return all(part not in ("", ".", "..") for part in name.split("/"))
