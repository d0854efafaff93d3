"""Whether the model speaks a document's language: how well it reads the beginning."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..backbone.model import Backbone
from ..data.notes import warn

READ: Final = 256  # tokens
# Nats for a byte of the text. SmolLM2-135M takes 0.69 to 0.91 for English prose, manuals and made-up facts, and 1.12 to
# 2.04 for manual pages in eleven languages that it does not speak; Russian, whose letters have two bytes, takes 0.85.
STRANGE: Final = 1.0


def warn_of_strange_language(backbone: Backbone, token_ids: Tensor, name: str) -> None:
    """Issue a TaskDataWarning for a document that the model reads badly. `token_ids` [N] int64."""
    if (found := nats_per_byte(backbone, token_ids[:READ])) > STRANGE:
        warn(
            f"{name}: the model reads this document badly ({found:.2f} nats a byte; English takes a small model 0.7 to "
            "0.9): does it speak the language? What it does not understand it cannot study"
        )


@torch.no_grad()
def nats_per_byte(backbone: Backbone, token_ids: Tensor) -> float:
    """The NLL of a text [N], whose first token is given, by the bytes of the others."""
    ids = token_ids[None].to(backbone.device)
    logprobs = backbone.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
    nll = -float(logprobs.gather(1, ids[0, 1:, None]).sum())
    return nll / max(1, len(backbone.tokenizer.decode(ids[0, 1:]).encode()))
