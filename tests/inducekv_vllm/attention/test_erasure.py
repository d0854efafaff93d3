"""Payloads that no bundle has any more are nowhere in the memory of the process that had them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from inducekv_vllm.bundle import write_bundle
from tests.inducekv_vllm.attention.test_sharing import of_contents
from tests.server.memory_scan import search

SOUGHT = (0, 1, 5, 6)  # contents
LENGTH = 8  # numbers in a row that make a find: a token of a head


def mark(content: int) -> float:
    return float(torch.tensor(0.6182 + content / 128).half())


def pattern(content: int, dtype: torch.dtype) -> bytes:
    return torch.full((LENGTH,), mark(content), dtype=dtype).view(torch.uint8).numpy().tobytes()


class Process:
    """Runs `erasing`."""

    def __init__(self, dtype: str) -> None:
        command = [sys.executable, "-m", "tests.inducekv_vllm.attention.erasing", dtype]
        self._running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def load_or_release(self, path: Path) -> None:
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        print(path, file=self._running.stdin, flush=True)
        assert self._running.stdout.readline() == "done\n"

    def finds(self) -> set[int]:
        """The contents of SOUGHT that are there, in the type of a file or of the pool."""
        dtypes = (torch.float16, torch.float32)
        sought = {f"{content} {dtype}": pattern(content, dtype) for content in SOUGHT for dtype in dtypes}
        return {int(name.split()[0]) for name, count in search([self._running.pid], sought).items() if count}

    def end(self) -> None:
        self._running.communicate()
        assert self._running.returncode == 0


def test_nothing_is_left_of_what_was_released(tmp_path: Path) -> None:
    """Tokens are not adjacent behind a gate, and in gaps that others left; a shared entry stays with its other name."""
    process = Process("float32")
    versions = {
        "gated": ([0, 1, 2, 3], "gated", 2),  # three tasks
        "other": ([4, 1, 5], "gated", 2),
        "in gaps": ([6, 7, 8, 9], "merged", 0),
    }
    for name, version in versions.items():
        write_bundle(of_contents(*version, mark=mark), tmp_path / name)
    for name in ("gated", "other"):
        process.load_or_release(tmp_path / name)
    assert process.finds() == {0, 1, 5}
    for name in ("gated", "in gaps"):
        process.load_or_release(tmp_path / name)
    assert process.finds() == {1, 5, 6}
    for name in ("other", "in gaps"):
        process.load_or_release(tmp_path / name)
    assert process.finds() == set()
    process.end()
