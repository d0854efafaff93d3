"""Workers that fail or wait where a test wants it; a server of the tests starts them by their paths."""

import os
import time
from pathlib import Path
from typing import Any

from inducekv_vllm.attention.host_bundle import HostBundle
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.worker import InduceKVWorker

HELD_ENTRY = "held-by-the-worker"  # id of an entry
HELD_S = 60.0  # nothing is held longer
HELD_UNLOADS = "INDUCEKV_TEST_HELD_UNLOADS"  # a variable: while there is a file of this path, unloads are held


class HoldingWorker(InduceKVWorker):  # type: ignore[valid-type, misc]
    """Holds the load of a bundle with `HELD_ENTRY` from PATH: makes the file PATH.held, and waits until it is gone."""

    def _read_bundle(self, path: str, digest: str) -> HostBundle:
        if any(entry.id == HELD_ENTRY for entry in read_bundle(path).metadata.entries):
            hold(path)
        return super()._read_bundle(path, digest)

    def inducekv_unload_bundle(self, digest: str, keep: bool = False) -> dict[str, Any]:
        if (path := os.environ.get(HELD_UNLOADS)) and Path(path).exists():
            hold(path)
        answer: dict[str, Any] = super().inducekv_unload_bundle(digest, keep)
        return answer


def hold(path: str) -> None:
    held, until = held_file(path), time.monotonic() + HELD_S
    held.touch()
    while held.exists() and time.monotonic() < until:
        time.sleep(0.02)


def held_file(path: Path | str) -> Path:
    return Path(f"{path}.held")
