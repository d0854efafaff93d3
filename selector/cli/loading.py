"""Load the model of a command: this imports transformers, which takes seconds, so commands do it last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..backbone.model import Backbone


def load_backbone(model: str, device: str | None = None, dtype: str = "float32") -> Backbone:
    """Without transformers' progress bars. Raises as `Backbone.load` does.

    Args:
        device: None for the first GPU that torch sees, else the CPU: `CUDA_VISIBLE_DEVICES` says which it sees.
        dtype: a name of torch's.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from ..backbone.model import Backbone
    from ..runtime.cpu import keep_freed_memory

    keep_freed_memory()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    return Backbone.load(model, getattr(torch, dtype), device)
