"""The recipes' names, as bundles record them."""

from typing import Final

BUILD: Final = "build"  # extraction alone
ROUTE: Final = "route"  # no entries, an adapter for each task
PAPER: Final = "paper"
REFINED: Final = "refined"
