"""The recipes' names, as bundles record them."""

from typing import Final

BUILD: Final = "build"  # extraction alone
PAPER: Final = "paper"
REFINED: Final = "refined"
