"""What this machine's CPU computes fast, and what makes it faster."""

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import torch

CPU_INFO: Final = Path("/proc/cpuinfo")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
MOST: Final = 2**31 - 1  # bytes
BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16"})


def has_bfloat16() -> bool:
    """Whether it multiplies matrices in bfloat16 by instructions; without them that is several times slower."""
    # Torch also calls bfloat16 supported where it emulates it.
    return not BFLOAT16.isdisjoint(_flags(CPU_INFO))


@cache
def _flags(info: Path) -> frozenset[str]:
    lines = (line for line in info.read_text().splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())


@contextlib.contextmanager
def rounded_products() -> Iterator[None]:
    """Within the context, float32 matrices are multiplied as bfloat16 and added up in float32, if that is faster."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if has_bfloat16() else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees for its next tensors, if its C library can do that (glibc).

    If not, the kernel maps, clears and unmaps the memory of each large tensor: a sixth of the time of a compaction.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            library.mallopt(threshold, MOST)
