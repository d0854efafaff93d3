"""The order of the numbers of a query: a bundle's keys are in that of the checkpoint, and must be in the served one.

RoPE rotates pairs of numbers. Llama 4's checkpoint has the two of a pair side by side; vLLM loads its weights so that
the first numbers of all pairs come first.
"""

from dataclasses import replace
from typing import Any

import torch

from ..bundle import Bundle


def in_served_order(bundle: Bundle, model: Any) -> Bundle:
    """A bundle with its payload keys [L, B, J, m, D] in the order of the queries of a model of vLLM's."""
    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    if not hasattr(language, "permute_qk_weight_for_rotary"):
        return bundle
    keys = bundle.payload_keys
    return replace(bundle, payload_keys=torch.cat([keys[..., 0::2], keys[..., 1::2]], dim=-1))
