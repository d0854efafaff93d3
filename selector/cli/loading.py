"""Load the model of a command: this imports transformers, which takes seconds, so commands do it last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..backbone.model import Backbone


def usual_device() -> str:
    """The first GPU that torch sees, else the CPU: `CUDA_VISIBLE_DEVICES` says which it sees."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_backbone(model: str, device: str = "cpu", dtype: str = "float32") -> Backbone:
    """Without transformers' progress bars; `dtype` is a name of torch's. Raises as `Backbone.load` does."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from ..backbone.model import Backbone

    disable_progress_bar()  # type: ignore[no-untyped-call]
    return Backbone.load(model, getattr(torch, dtype), device)
