"""The gate log: the evidence of every request that a gate has decided on, and its decision; no text and no owner.

    {"gate": "5fa1...", "evidence": [0.0, 0.4127, ...], "task": "guild"}

"gate" tells the evidence of one gate from that of another (`inducekv_vllm.gate.token_digest`); "task" is null behind a
closed gate. Thresholds can be judged by it, and fitted again.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ..errors import ConfigError
from ..files.regular import open_regular
from ..retrieval.entry_terms import FloatArray
from ..vllm_seams.config import InduceKVConfig
from ..vllm_seams.logs import logger_of

logger = logger_of(__name__)
DIGITS: Final = 4
MAX_WAITING: Final = 1024  # lines; a disk that hangs takes no more memory


class GateLog:
    """Appends lines, whole ones, in a thread of its own. Without a file it does nothing."""

    def __init__(self, path: str | None = None) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._path = path
        self._file = None if path is None else open_log(path)
        self._disk = ThreadPoolExecutor(1, "gate-log")
        self._room = threading.BoundedSemaphore(MAX_WAITING)
        self._has_failed = False

    @classmethod
    def of(cls, config: InduceKVConfig) -> GateLog:
        return cls(config.gate_log)

    def note(self, gate: str, evidence: FloatArray, task: str | None) -> None:
        """Record a decision on evidence [H] of a gate of this digest, without waiting for the disk."""
        if self._file is None:
            return
        if not self._room.acquire(blocking=False):
            self._failed("the disk is too slow; lines are left out")
            return
        numbers = [round(number, DIGITS) for number in evidence.tolist()]
        record = {"gate": gate, "evidence": numbers, "task": task}
        self._disk.submit(self._append, self._file, json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        """Write what is waiting."""
        self._disk.shutdown()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, file: int, line: bytes) -> None:
        """In one piece: several processes may write to the file."""
        try:
            os.write(file, line)
        except OSError as error:
            self._failed(f"cannot write the gate log: {error.strerror}")
        finally:
            self._room.release()

    def _failed(self, reason: str) -> None:
        if not self._has_failed:  # once is enough
            logger.error("%s: %s", self._path, reason)
        self._has_failed = True


def open_log(path: str) -> int:
    """Open a file to append to, or begin one that only its owner can read.

    Raises:
        ConfigError: it cannot be opened, or is no regular file.
    """
    try:
        return open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be used as a gate log: {error.strerror}") from error
