"""What bundles record as the recipe that has made them."""

from typing import Final

ROUTE: Final = "route"  # no entries, an adapter for each task
PAPER: Final = "paper"
REFINED: Final = "refined"
IMPORTED: Final = "imported"  # a memory that was trained elsewhere, or the keys and values of a text
TAUGHT: Final = "teach"  # facts alone, see `inducekv_vllm.teaching`
