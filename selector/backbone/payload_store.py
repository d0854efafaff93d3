"""Payloads of a run's candidates on disk, for pools larger than the machine's memory.

    DIR/payload_keys.f16, DIR/payload_values.f16    [L, N, J, m, D] float16 each, the previous memory's entries first
    DIR/retrieval_keys-FIRST.safetensors            [n, d]: of a shard of the current task's entries, FIRST on; written
                                                    when its payloads are on disk

Files are written with plain writes and memory-mapped for reading: the operating system loads the pages that are used,
and drops them when memory is short. A run that is killed goes on after the last whole shard.

Shapes: L layers, N candidates, J KV heads, m payload tokens, D head size, d hidden size, n entries of a batch,
K entries that are read.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError

from ..runtime.files import replace_file

_FILES: Final = ("payload_keys.f16", "payload_values.f16")
_ITEM_BYTES: Final = 2


@dataclass(frozen=True)
class PayloadStore:
    """One run's files."""

    folder: Path
    shape: tuple[int, int, int, int, int]  # L, N, J, m, D
    num_previous: int  # of the N, the previous memory's

    @classmethod
    def open(cls, folder: Path, shape: tuple[int, int, int, int, int], previous: Bundle | None) -> PayloadStore:
        """The store as an earlier run has left it, or an empty one with its disk space reserved.

        Args:
            folder: belongs to this run alone: its content was made from the same examples by the same model.

        Raises:
            ConfigError: the disk is full or the folder cannot be written; nothing of the store is left.
        """
        store = cls(folder, shape, previous.num_entries if previous is not None else 0)
        if not len(store.retrieval_keys()):
            store._create(previous)
        return store

    def write(self, first: int, payload_keys: Tensor, payload_values: Tensor) -> None:
        """Write the payloads [L, n, J, m, D], any float type, of the current task's entries from `first` on.

        Raises:
            ConfigError: the disk is full or fails.
        """
        with self._naming_failures():
            self._write(self.num_previous + first, payload_keys, payload_values)

    def finish_shard(self, first: int, retrieval_keys: Tensor) -> None:
        """Sync all payloads, and write the `retrieval_keys` [n, d] of the current task's entries from `first` on.

        Raises:
            ConfigError: the disk is full or fails.
        """
        with self._naming_failures():
            for name in _FILES:
                with (self.folder / name).open("r+b") as file:
                    os.fsync(file.fileno())
            replace_file(self._shard(first), safetensors.torch.save({"retrieval_keys": retrieval_keys.contiguous()}))

    def retrieval_keys(self) -> Tensor:
        """The current task's retrieval keys up to the last whole shard without a gap: [n, d], [0, 0] without any."""
        shards, first = list[Tensor](), 0
        expected = [math.prod(self.shape) * _ITEM_BYTES] * len(_FILES)
        with contextlib.suppress(OSError, KeyError, safetensors.SafetensorError):  # the caller extracts the rest again
            if [(self.folder / name).stat().st_size for name in _FILES] == expected:
                while first < self.shape[1] - self.num_previous:
                    shards.append(safetensors.torch.load(self._shard(first).read_bytes())["retrieval_keys"])
                    first += len(shards[-1])
        return torch.cat(shards) if shards else torch.empty(0, 0)

    def mapped(self) -> tuple[Tensor, Tensor]:
        """All payload keys and values as read-only maps, [L, N, J, m, D] float16 each."""
        count = math.prod(self.shape)
        keys, values = (
            torch.from_file(str(self.folder / name), shared=True, size=count, dtype=torch.float16).view(self.shape)
            for name in _FILES
        )
        return keys, values

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the entries `rows` [K] int64 of all N: [L, K, J, m, D] float16 each. Reads nothing else.

        Raises:
            ConfigError: the files cannot be read.
        """
        L, N, *entry = self.shape
        size = math.prod(entry) * _ITEM_BYTES
        copies = []
        try:
            for name in _FILES:
                copy = torch.empty(L, len(rows), *entry, dtype=torch.float16)
                places = copy.view(L, len(rows), -1).numpy()
                with (self.folder / name).open("rb", buffering=0) as file:
                    for layer in range(L):
                        for place, row in zip(places[layer], rows.tolist(), strict=True):
                            if os.preadv(file.fileno(), [place.data], (layer * N + row) * size) != size:
                                raise OSError(f"{name} is shorter than it was")
                copies.append(copy)
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot read the candidates' payloads: {error}") from error
        return copies[0], copies[1]

    def _shard(self, first: int) -> Path:
        return self.folder / f"retrieval_keys-{first}.safetensors"

    def _create(self, previous: Bundle | None) -> None:
        with self._naming_failures():
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir()
            for name in _FILES:
                with (self.folder / name).open("wb") as file:
                    # Reserve the space: a full disk is an error here, not a signal when the map is read.
                    os.posix_fallocate(file.fileno(), 0, math.prod(self.shape) * _ITEM_BYTES)
            if previous is not None:
                self._write(0, previous.payload_keys, previous.payload_values)

    def _write(self, row: int, *payloads: Tensor) -> None:
        L, N, *entry = self.shape
        for name, payload in zip(_FILES, payloads, strict=True):
            assert payload.shape[0] == L
            assert list(payload.shape[2:]) == entry
            with (self.folder / name).open("r+b") as file:
                for layer, entries in enumerate(payload):
                    file.seek((layer * N + row) * math.prod(entry) * _ITEM_BYTES)
                    file.write(entries.to("cpu", torch.float16).contiguous().numpy().data)

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """What the system refuses becomes a ConfigError, and the store is removed."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            needed = len(_FILES) * math.prod(self.shape) * _ITEM_BYTES / 2**20
            raise ConfigError(
                f"{self.folder}: cannot keep the candidates' payloads here, {needed:.1f} MiB: {error}"
            ) from error
