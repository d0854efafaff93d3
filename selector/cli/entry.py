"""The commands as they are installed: one that lacks what the extra `teach` brings ends in a line that names it."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Final

NEEDED: Final = "rich"
MISSING: Final = 2


def bundle() -> int:
    return _run("bundle")


def select() -> int:
    return _run("select")


def _run(module: str) -> int:
    if find_spec(NEEDED) is None:
        print(f"inducekv-{module}: needs {NEEDED}: pip install 'inducekv[teach]'", file=sys.stderr)
        return MISSING
    status: int = import_module(f".{module}", __package__).main()
    return status
