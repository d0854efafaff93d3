"""A bundle's pages, resident once for all requests, and one request's view of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..bundle import Bundle
from ..errors import UnsupportedModel
from ..page_terms import Form, PageTerms, Weighting


@dataclass(frozen=True, eq=False)
class LayerPages:
    """One layer's memory tokens on this rank; payload token t of entry i is at index i m + t.

    Decoupled memory has one more token, the last one, with key and value 0, and its values and maps are times the gate.
    """

    keys: Tensor  # [J, B m, D], before RoPE, as at position 0; decoupled: [J, B m + 1, D]
    values: Tensor  # as the keys
    gate: float
    bias: float
    # The maps of the attention output, if the bundle has any; row t of entry i's map is at index i r + t.
    map_in: Tensor | None = None  # [J, B r, G D]
    map_out: Tensor | None = None  # [J, B r, G D], transposed


@dataclass(frozen=True, eq=False)
class ResidentBundle:
    """The part of a bundle that a worker needs."""

    digest: str
    num_entries: int  # B
    payload_tokens: int  # m
    weighting: Weighting
    form: Form
    layers: tuple[LayerPages, ...]  # [L]
    map_rank: int = 0  # r; 0: no maps

    @property
    def nbytes(self) -> int:
        tensors = [t for p in self.layers for t in (p.keys, p.values, p.map_in, p.map_out)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, tp_rank: int, tp_size: int, dtype: torch.dtype, device: torch.device
    ) -> ResidentBundle:
        """Select the KV heads of a tensor-parallel rank and convert the stored float16 to `dtype`."""
        L, B, J, m, _ = bundle.payload_keys.shape
        heads = kv_heads_of_rank(J, tp_rank, tp_size)

        decoupled = bundle.metadata.form == "decoupled"

        def of_rank(payload: Tensor, factor: float = 1.0) -> Tensor:  # [B, J, x, y] -> [J of this rank, B x, y]
            own = (payload[:, heads].float() * factor).to(device=device, dtype=dtype)
            return own.transpose(0, 1).flatten(1, 2).contiguous()

        def tokens(payload: Tensor, factor: float = 1.0) -> Tensor:
            return pad(of_rank(payload, factor), (0, 0, 0, int(decoupled)))

        def pages(layer: int) -> LayerPages:
            gate = float(bundle.value_gates[layer])
            factor = gate if decoupled else 1.0
            return LayerPages(
                keys=tokens(bundle.payload_keys[layer]),
                values=tokens(bundle.payload_values[layer], factor),
                gate=gate,
                bias=float(bundle.layer_bias[layer]),
                map_in=None if bundle.map_in is None else of_rank(bundle.map_in[layer]),
                map_out=None if bundle.map_out is None else of_rank(bundle.map_out[layer].transpose(-1, -2), factor),
            )

        layers = tuple(pages(layer) for layer in range(L))
        rank = 0 if bundle.metadata.output_map is None else bundle.metadata.output_map.rank
        return cls(bundle.digest, B, m, bundle.metadata.weighting, bundle.metadata.form, layers, rank)


def kv_heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> slice:
    """Return the KV heads of a tensor-parallel rank as in vLLM: an equal share, or one replicated head.

    Raises:
        UnsupportedModel: the heads cannot be split evenly.
    """
    if num_kv_heads >= tp_size:
        if num_kv_heads % tp_size:
            raise UnsupportedModel(f"{num_kv_heads} KV heads cannot be shared out over {tp_size} ranks")
        share = num_kv_heads // tp_size
        return slice(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % num_kv_heads:
        raise UnsupportedModel(f"{num_kv_heads} KV heads cannot be replicated over {tp_size} ranks")
    head = tp_rank // (tp_size // num_kv_heads)
    return slice(head, head + 1)


@dataclass(frozen=True, eq=False)
class RequestMemory:
    """One request's view of a resident bundle: its `PageTerms`, repeated for each memory token and row of a map.

    S counts the last token of decoupled memory too, whose log weight is 0.

    None stands for the neutral value (all tokens in order, ones, zeros); the kernels then skip that term.
    """

    bundle: ResidentBundle
    token_index: Tensor | None  # [S] int64 into the B m tokens
    key_scale: Tensor | None  # [S] float32
    log_weight: Tensor | None  # [S] float32
    value_scale: Tensor | None  # [S] float32
    log_remainder: float  # -inf: none
    map_index: Tensor | None = None  # [k r] int64 into the B r rows
    map_weight: Tensor | None = None  # [k r] float32

    @classmethod
    def from_terms(cls, bundle: ResidentBundle, terms: PageTerms, device: torch.device) -> RequestMemory:
        """Sort the terms into the order of the memory, so that requests that read all of it share its tensors."""
        order = np.argsort(terms.entries)  # [k]
        entries = terms.entries[order]  # [k]
        m, r = bundle.payload_tokens, bundle.map_rank
        whole = len(entries) == bundle.num_entries

        null = [bundle.num_entries * m] if bundle.form == "decoupled" else []  # the index of the last token

        def spread(per_page: npt.NDArray[np.float32], neutral: float) -> Tensor | None:  # [k] -> [k m]
            if np.all(per_page == neutral):
                return None
            last = np.full(len(null), neutral, dtype=np.float32)
            return torch.from_numpy(np.concatenate([np.repeat(per_page[order], m), last])).to(device)

        def index(rows: int, more: Sequence[int] = ()) -> Tensor | None:  # [k rows]
            if whole:
                return None
            own = (entries[:, None] * rows + np.arange(rows)).reshape(-1)
            return torch.from_numpy(np.concatenate([own, np.asarray(more, dtype=np.int64)])).to(device)

        alpha = (np.exp(terms.log_weight) * terms.value_scale)[order]  # [k]
        weighted = r > 0 and not np.all(alpha == 1)
        return cls(
            bundle=bundle,
            token_index=index(m, null),
            key_scale=spread(terms.key_scale, 1.0),
            log_weight=spread(terms.log_weight, 0.0),
            value_scale=spread(terms.value_scale, 1.0),
            log_remainder=terms.log_remainder,
            map_index=index(r) if r else None,
            map_weight=torch.from_numpy(np.repeat(alpha, r)).to(device) if weighted else None,
        )

    @property
    def num_tokens(self) -> int:
        """S"""
        if self.token_index is not None:
            return len(self.token_index)
        return self.bundle.layers[0].keys.shape[1]

    @property
    def has_remainder(self) -> bool:
        return self.log_remainder != -math.inf
