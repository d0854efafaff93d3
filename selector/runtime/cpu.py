"""What this machine's CPU computes fast."""

from pathlib import Path
from typing import Final

CPU_INFO: Final = Path("/proc/cpuinfo")
BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16"})


def has_bfloat16() -> bool:
    """Whether it multiplies matrices in bfloat16 by instructions; without them that is several times slower."""
    # Torch also calls bfloat16 supported where it emulates it.
    flags = (line for line in CPU_INFO.read_text().splitlines() if line.startswith("flags"))
    return not BFLOAT16.isdisjoint(next(flags, "").split())
