"""A document's memory before training: keys and values of its tokens, as the frozen model has them.

Shapes: N tokens of the document, m of the memory, L layers, J KV heads, D and V sizes of a head's keys and values, d
hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

import torch
from torch import Tensor

from inducekv_vllm.retrieval.entry_terms import Form

from ..backbone.extraction import pooling_matrices
from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone, pool_retrieval_keys
from ..backbone.prefix import cached_at
from ..update.parametrization import INITIAL_TEMPERATURE
from .settings import Start

WEIGHTINGS: Final[Mapping[Form, Literal["prior", "uniform"]]] = {"merged": "prior", "decoupled": "uniform"}


def initial_memory(backbone: Backbone, token_ids: Tensor, tokens: int, form: Form, start: Start) -> TensorMemory:
    """One entry of m tokens, which stand in front of a request. With all N, merged memory is exactly the prefix.

    New values of decoupled memory are 0, so that it changes nothing before it is trained.

    Args:
        token_ids: [N] int64 of the document, or of its beginning.
        tokens: m.
        start: "first": the first m tokens; "pooled": means over m segments of all of them (paper, Eq.
            payload_rewrite).
    """
    read = (token_ids[:tokens] if start == "first" else token_ids)[None]
    cached = cached_at(backbone, torch.arange(-read.shape[1], 0)[None], input_ids=read)
    keys, values = cached.keys[:, 0], cached.values[:, 0]
    if start == "pooled":
        (pooling,) = pooling_matrices([keys.shape[2]], tokens)  # [m, N]
        keys, values = (torch.einsum("mn,ljnd->ljmd", pooling, each) for each in (keys, values))
    L = backbone.num_layers
    memory = TensorMemory(
        retrieval_keys=pool_retrieval_keys(cached.hidden, torch.ones_like(read)).half().float(),  # a bundle rounds it
        payload_keys=keys[:, None].contiguous(),
        payload_values=values[:, None].contiguous(),
        temperature=torch.tensor(INITIAL_TEMPERATURE),
        value_gates=torch.ones(L),
        layer_bias=torch.zeros(L),
        weighting=WEIGHTINGS[form],
        form=form,
    )
    return replace(memory, payload_values=torch.zeros_like(memory.payload_values)) if form == "decoupled" else memory
