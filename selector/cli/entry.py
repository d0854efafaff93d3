"""The commands as they are installed: one that lacks what the extra `teach` brings ends in a line that names it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Final

NEEDED: Final = {"inducekv-bundle": ("bundle", ["rich"]), "inducekv-select": ("select", ["matplotlib", "rich"])}
MISSING: Final = 2


def bundle() -> int:
    return _run("inducekv-bundle")


def select() -> int:
    return _run("inducekv-select")


def _run(program: str) -> int:
    module, needed = NEEDED[program]
    if missing := [name for name in needed if find_spec(name) is None]:
        print(f"{program}: needs {' and '.join(missing)}: pip install 'inducekv[teach]'", file=sys.stderr)
        return MISSING
    status: int = import_module(f".{module}", __package__).main()
    return status
