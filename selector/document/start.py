"""A document's memory before training: keys and values of its tokens, as the frozen model has them.

Shapes: N tokens of the document, m of the memory, L layers, J KV heads, D and V sizes of a head's keys and values, d
hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.retrieval.entry_terms import Form

from ..backbone.extraction import pooling_matrices
from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone, pool_retrieval_keys
from ..update.parametrization import INITIAL_TEMPERATURE
from .settings import Start

WEIGHTINGS: Final[Mapping[Form, Literal["prior", "uniform"]]] = {"merged": "prior", "decoupled": "uniform"}


@dataclass(frozen=True)
class DocumentCache:
    """What the model keeps of a document, or of as much of it as its context holds."""

    retrieval_key: Tensor  # [d]
    keys: Tensor  # [L, J, N, D]
    values: Tensor  # [L, J, N, V]


@torch.no_grad()
def document_cache(backbone: Backbone, token_ids: Tensor) -> DocumentCache:
    """Of a text that ends just before a request's first token.

    Its keys are rotated by -N..-1. A server does not rotate memory, so a key acts as that of a prefix would: what a
    query at t sees of R(-p) k depends on t + p alone. With all N tokens merged memory is exactly the prefix.

    Args:
        token_ids: [N] int64.
    """
    N = len(token_ids)
    positions = torch.arange(-N, 0, device=backbone.device)[None]
    text = backbone.model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=text) if backbone.has_states else DynamicCache()  # which keeps all, whatever the window
    hidden = backbone.model.model(
        input_ids=token_ids[None].to(backbone.device), position_ids=positions, past_key_values=cache, use_cache=True
    ).last_hidden_state
    layers: Any = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    if len(layers) != backbone.num_layers or layers[0].keys.shape[-1] != backbone.head_dim:
        raise UnsupportedModel("a document's memory needs a model that keeps keys and values in every attention layer")
    keys, values = (
        torch.stack([getattr(each, name)[0] for each in layers]).float().cpu() for name in ("keys", "values")
    )
    return DocumentCache(pool_retrieval_keys(hidden, torch.ones_like(positions))[0].float().cpu(), keys, values)


def initial_memory(backbone: Backbone, token_ids: Tensor, tokens: int, form: Form, start: Start) -> TensorMemory:
    """One entry of m tokens.

    New values of decoupled memory are 0, so that it changes nothing before it is trained.

    Args:
        token_ids: [N] int64 of the document, or of its beginning.
        tokens: m.
        start: "first": the first m tokens; "pooled": means over m segments of all of them (paper, Eq.
            payload_rewrite).
    """
    cache = document_cache(backbone, token_ids[:tokens] if start == "first" else token_ids)
    keys, values = cache.keys, cache.values
    if start == "pooled":
        (pooling,) = pooling_matrices([keys.shape[2]], tokens)  # [m, N]
        keys, values = (torch.einsum("mn,ljnd->ljmd", pooling, each) for each in (keys, values))
    L = backbone.num_layers
    memory = TensorMemory(
        retrieval_keys=cache.retrieval_key[None].half().float(),  # a bundle rounds it
        payload_keys=keys[:, None].contiguous(),
        payload_values=values[:, None].contiguous(),
        temperature=torch.tensor(INITIAL_TEMPERATURE),
        value_gates=torch.ones(L),
        layer_bias=torch.zeros(L),
        weighting=WEIGHTINGS[form],
        form=form,
    )
    return replace(memory, payload_values=torch.zeros_like(memory.payload_values)) if form == "decoupled" else memory
