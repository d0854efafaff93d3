"""Search the memory of running processes, as somebody who has taken the machine could."""

from __future__ import annotations

import contextlib
import mmap
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

CHUNK_PAGES = 2**14
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) [0-9a-f]+ \S+ \d+ *(.*)")
_IN_MEMORY = np.uint64(3 << 62)  # of <linux/pagemap>: present or in swap


def search(pids: Iterable[int], patterns: Mapping[str, bytes]) -> Counter[str]:
    """How often each pattern occurs in memory that the processes can write to, or have mapped from a bundle."""
    found: Counter[str] = Counter()
    for pid in pids:
        for content in _memory(pid):
            for name, pattern in patterns.items():
                found[name] += content.count(pattern)
    return found


def _memory(pid: int) -> Iterator[bytes]:
    """The runs of pages that are there; a long run in pieces that share a page."""
    with contextlib.ExitStack() as stack:
        memory, pages = (
            stack.enter_context(Path(f"/proc/{pid}/{name}").open("rb", buffering=0)) for name in ("mem", "pagemap")
        )
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            parsed = _MAPPING.fullmatch(line)
            assert parsed, line
            if not (parsed[3].startswith("rw") or parsed[4].endswith(".safetensors")) or parsed[4].startswith("[v"):
                continue
            first, end = (int(address, 16) // mmap.PAGESIZE for address in (parsed[1], parsed[2]))
            pages.seek(8 * first)
            there = np.frombuffer(pages.read(8 * (end - first)), np.uint64) & _IN_MEMORY != 0
            edges = np.flatnonzero(np.diff(there.astype(np.int8), prepend=0, append=0)) + first
            for begin, stop in edges.reshape(-1, 2).tolist():
                for page in range(begin, stop, CHUNK_PAGES):
                    with contextlib.suppress(OSError):  # unmapped in the meantime
                        memory.seek(page * mmap.PAGESIZE)
                        yield memory.read((min(CHUNK_PAGES + 1, stop - page)) * mmap.PAGESIZE)
