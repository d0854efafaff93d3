"""`inducekv-select` as a program of its own whose gates are fitted to few questions."""

from __future__ import annotations

from selector.cli.select import main
from selector.runtime.distributed import leave
from tests.gates import small_fits

if __name__ == "__main__":
    with small_fits():
        status = main()
    leave(status)
