"""Search the memory of running processes, as somebody who has taken the machine could."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

CHUNK = 2**26
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) [0-9a-f]+ \S+ \d+ *(.*)")


def descendants() -> list[int]:
    """All processes that this one has started, and theirs."""
    return [process.pid for process in psutil.Process().children(recursive=True)]


def search(pids: Iterable[int], patterns: Mapping[str, bytes]) -> Counter[str]:
    """How often each pattern occurs in memory that the processes can write to, or have mapped from a bundle."""
    found: Counter[str] = Counter()
    longest = max(map(len, patterns.values()))
    for pid in pids:
        for content in _memory(pid, overlap=longest - 1):
            for name, pattern in patterns.items():
                found[name] += content.count(pattern)
    return found


def _memory(pid: int, overlap: int) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
        for line in mappings:
            parsed = _MAPPING.fullmatch(line)
            assert parsed, line
            begin, end = int(parsed[1], 16), int(parsed[2], 16)
            is_data = parsed[3].startswith("rw") or parsed[4].endswith(".safetensors")
            if not is_data or parsed[4].startswith(("/dev/dri", "[vvar", "[vsyscall")):
                continue
            for place in range(begin, end, CHUNK):
                try:
                    memory.seek(place)
                    yield memory.read(min(CHUNK + overlap, end - place))
                except OSError:  # unmapped in the meantime
                    break
