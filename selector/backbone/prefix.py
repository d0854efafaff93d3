"""What tokens leave in the KV cache at any positions: at -p to -1 they stand in front of a request that begins at 0.

A server does not rotate memory, so a key acts as that of a prefix would: what a query at t sees of R(-p) k depends on
t + p alone.

Shapes: n sequences of T tokens, L layers, J KV heads, D and V sizes of a head's keys and values, d hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from inducekv_vllm.errors import UnsupportedModel

from .loading import decoder
from .model import Backbone


@dataclass(frozen=True)
class Cached:
    """Of n sequences."""

    keys: Tensor  # [L, n, J, T, D] float32, rotated
    values: Tensor  # [L, n, J, T, V] float32
    hidden: Tensor  # [n, T, d] float32, after the final norm


@torch.no_grad()
def cached_at(backbone: Backbone, positions: Tensor, **tokens: Tensor) -> Cached:
    """One forward pass of the decoder.

    Args:
        positions: [n, T] int64, which may be negative.
        tokens: `input_ids` [n, T] int64, or `inputs_embeds` [n, T, d].

    Raises:
        UnsupportedModel: it keeps something else than keys and values in a layer with attention.
    """
    text, device = backbone.model.config.get_text_config(decoder=True), backbone.device
    cache = DynamicCache(config=text) if backbone.has_states else DynamicCache()  # which keeps all, whatever the window
    hidden = decoder(backbone.model)(
        **{name: each.to(device) for name, each in tokens.items()},
        position_ids=positions.to(device),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    layers: Any = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    if len(layers) != backbone.num_layers or layers[0].keys.shape[-1] != backbone.head_dim:
        raise UnsupportedModel("the model does not keep keys and values in every layer with attention")
    keys, values = (
        torch.stack([getattr(layer, name) for layer in layers]).float().cpu() for name in ("keys", "values")
    )
    return Cached(keys, values, hidden.float().cpu())
