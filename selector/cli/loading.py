"""Load the model of a command: this imports transformers, which takes seconds, so commands do it last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..backbone.model import Backbone


def load_backbone(model: str, device: str = "cpu") -> Backbone:
    """Without transformers' progress bars; raises as `Backbone.load` does."""
    from transformers.utils.logging import disable_progress_bar

    from ..backbone.model import Backbone

    disable_progress_bar()  # type: ignore[no-untyped-call]
    return Backbone.load(model, device=device)
