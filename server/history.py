"""The versions that each name has stood for: in memory, and with a state folder on disk.

    DIR/registry.json          names and their versions, the served one first; replaced whole with every change
    DIR/DIGEST.safetensors     a copy of each version that registry.json names
    DIR/lock                   held while a server uses the folder

A change is in registry.json before requests see it and before it is acknowledged. So a server that was killed at any
moment serves, when it starts again, the last acknowledged version or the one that it was about to acknowledge.

A folder with anything else in it, and without a registry, is refused. Nothing is removed but what a server has written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError, ConfigError
from inducekv_vllm.files.regular import open_regular
from inducekv_vllm.files.whole import lock_file, replacing
from inducekv_vllm.host.logs import logger_of

logger = logger_of(__name__)
START: Final = "start"  # who loads the bundles of the command line
REGISTRY: Final = "registry.json"
LOCK: Final = "lock"
EMPTY: Final = "lost+found"  # an empty file system has this folder
_COPY: Final = re.compile(r"[0-9a-f]{64}\.safetensors")
_TEMPORARY: Final = re.compile(rf"\.({re.escape(REGISTRY)}|{_COPY.pattern})\.[0-9a-f]{{16}}\.tmp")


class VersionRecord(BaseModel):
    """One version of a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(pattern="^[0-9a-f]{64}$")
    parent_digest: str | None  # of the memory that it was made from
    loaded_at: datetime  # when the name began to stand for it
    by: str  # who asked for it
    source: str  # the path that it was loaded from
    file: str  # where its bytes are: a file of the state folder, or the source


class _Registry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    names: dict[str, Annotated[tuple[VersionRecord, ...], Field(min_length=1)]] = {}


class History:
    """The versions of each name, the served one first; at most `keep` of a name."""

    def __init__(self, folder: str | None = None, keep: int = 3) -> None:
        """Read what an earlier server has left in `folder`; None keeps the history in memory.

        Raises:
            ConfigError: the folder cannot be used or holds something else, another server uses it, or its registry
                cannot be read.
        """
        self._folder = None if folder is None else Path(folder).absolute()
        self._keep = keep
        self._names: Mapping[str, tuple[VersionRecord, ...]] = {}
        self._lock: int | None = None
        self._copies: set[str] = set()  # names of the files that servers have written here, and no others
        if self._folder is not None:
            require_state_folder(self._folder)
            self._lock = _locked(self._folder)
            self._names = _read(self._folder / REGISTRY).names
            self._copies = self._used | _left_behind(self._folder, self._used)
            self.sweep()

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def of(self, name: str) -> tuple[VersionRecord, ...]:
        """The versions of a name, the served one first; empty for a name that is not loaded."""
        return self._names.get(name, ())

    def path(self, record: VersionRecord) -> Path:
        """The file to read a version from."""
        return Path(record.file) if self._folder is None else self._folder / record.file

    def is_whole(self, record: VersionRecord) -> bool:
        """Whether the file of a version holds what it held when it was loaded."""
        try:
            _whole(self.path(record), record.digest)
        except BundleError:
            return False
        return True

    def store(self, bundle: Bundle, source: str) -> str:
        """Copy a bundle that has been read and checked into the state folder; return the path to load it from.

        A bundle with task adapters stays where it is, because their folders may be relative to its own.

        Raises:
            BundleError: it cannot be written.
        """
        if self._folder is None or bundle.metadata.task_adapters:
            return source
        copy = self._folder / f"{bundle.digest}.safetensors"
        if copy == Path(source):
            return source
        self._copies.add(copy.name)
        if not (copy.exists() and _is_copy(copy, bundle)):
            write_bundle(bundle, copy, verify=False)
        return str(copy)

    def record(self, digest: str, parent_digest: str | None, by: str, source: str, path: str) -> VersionRecord:
        """The record of a version that begins now and is read from `path`."""
        in_folder = self._folder is not None and Path(path).parent == self._folder
        file = Path(path).name if in_folder else path
        now = datetime.now(UTC)
        return VersionRecord(digest=digest, parent_digest=parent_digest, loaded_at=now, by=by, source=source, file=file)

    def push(self, name: str, record: VersionRecord) -> None:
        """Make a version the one that `name` stands for; an earlier record of the same version goes.

        Raises:
            ConfigError: the registry cannot be written. Nothing has changed.
        """
        served, *_ = (*self.of(name), None)
        if served is not None and (served.digest, served.source) == (record.digest, record.source):
            return
        earlier = [each for each in self.of(name) if each.digest != record.digest]
        self._commit({**self._names, name: (record, *earlier)[: self._keep]})

    def drop(self, name: str) -> None:
        """Forget a name. Raises ConfigError: the registry cannot be written, and nothing has changed."""
        self._commit({each: versions for each, versions in self._names.items() if each != name})

    def forget(self, name: str, digests: Collection[str]) -> None:
        """Drop earlier versions of a name. Raises ConfigError: the registry cannot be written; nothing has changed."""
        served, *earlier = self.of(name)
        assert served.digest not in digests
        self._commit({**self._names, name: (served, *(each for each in earlier if each.digest not in digests))})

    @property
    def digests(self) -> frozenset[str]:
        """The versions that any name has."""
        return frozenset(record.digest for versions in self._names.values() for record in versions)

    @property
    def _used(self) -> set[str]:
        """The copies that the names have versions of."""
        files = {record.file for versions in self._names.values() for record in versions}
        return {file for file in files if _COPY.fullmatch(file)}

    def sweep(self) -> None:
        """Remove the copies that no name has a version of."""
        if self._folder is None:
            return
        for name in self._copies - self._used:
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError as error:
                logger.error("%s: this copy cannot be removed: %s", self._folder / name, error.strerror)
            else:
                self._copies.discard(name)

    def _commit(self, names: Mapping[str, tuple[VersionRecord, ...]]) -> None:
        if self._folder is not None:
            target = self._folder / REGISTRY
            try:
                with replacing(target) as temporary:
                    temporary.write_text(_Registry(names=dict(names)).model_dump_json(indent=1))
            except OSError as error:
                raise ConfigError(f"{target}: cannot write the registry: {error.strerror}; nothing changed") from error
        self._names = names
        self.sweep()


def require_state_folder(folder: Path) -> None:
    """Refuse a folder that a server cannot take for its own: one that is neither empty nor has been one before.

    Raises:
        ConfigError: names what is in it.
    """
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used as a state folder: {error.strerror}") from error
    strange = sorted(name for name in names if not _is_ours(name))
    if strange and REGISTRY not in names:
        raise ConfigError(
            f"{folder}: cannot be used as a state folder: expected an empty folder, or that of an earlier server, "
            f"found {strange[0]!r}"
        )


def _is_ours(name: str) -> bool:
    return name in (REGISTRY, LOCK, EMPTY) or bool(_COPY.fullmatch(name) or _TEMPORARY.fullmatch(name))


def _left_behind(folder: Path, used: Collection[str]) -> set[str]:
    """Copies that a killed server has not recorded any more. What it has not finished is removed at once."""
    found, strange = set(), []
    for path in sorted(folder.iterdir()):
        is_file = path.is_file() and not path.is_symlink()
        if is_file and _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)
        elif is_file and _COPY.fullmatch(path.name) and path.name not in used and _claimed_digest(path) == path.stem:
            found.add(path.name)
        elif path.name not in (*used, REGISTRY, LOCK, EMPTY):
            strange.append(path.name)
    if strange:
        logger.warning("%s: left alone, because no server has written it: %s", folder, ", ".join(strange[:10]))
    return found


def _whole(path: Path, digest: str) -> Bundle:
    """The bundle of this digest in a file. Raises BundleError: the file does not hold it."""
    bundle = read_bundle(path)
    if bundle.digest != digest:
        raise BundleError(f"{path}: it holds the bundle of digest {bundle.digest}")
    return bundle


def _is_copy(copy: Path, bundle: Bundle) -> bool:
    """Whether a file holds this bundle, and its signature: the same content may come with another one."""
    try:
        found = _whole(copy, bundle.digest)
    except BundleError as error:
        logger.warning("the copy of digest %s is damaged, and is written again: %s", bundle.digest, error)
        return False
    return bundle.signature in (None, found.signature)


def _claimed_digest(path: Path) -> str | None:
    """The digest in a bundle's header, of a file that may be damaged; None if it is no bundle."""
    try:
        return read_bundle(path, verify=False).digest
    except BundleError:
        return None


def _locked(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = lock_file(folder / LOCK)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used as a state folder: {error.strerror}") from error
    if lock is None:
        raise ConfigError(f"{folder}: another server uses this state folder")
    return lock


def _read(path: Path) -> _Registry:
    problem = f"{path}: the registry of an earlier server cannot be read"
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return _Registry.model_validate_json(file.read())
    except FileNotFoundError:
        return _Registry()
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from error
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_input=False)
        raise ConfigError(f"{problem}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from error
