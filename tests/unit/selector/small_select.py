"""`inducekv-select` as a program of its own whose gates are fitted to few questions."""

import sys

from selector.cli.select import main
from tests.gates import small_fits

if __name__ == "__main__":
    with small_fits():
        status = main()
    sys.exit(status)
