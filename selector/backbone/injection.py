"""Attention with injected memory in transformers: the plain, differentiable reference for the server.

    merged      one softmax over [memory ; self]
    decoupled   self-attention plus a softmax over [memory ; one token of logit 0 and value 0], from a position on;
                plus low-rank maps of the output of self-attention, if the memory has any

Shapes: n requests, B entries, m payload tokens, L layers, H query heads, J KV heads, G = H / J, D head size,
d hidden size, T query tokens, S tokens of the request itself that they may see, r rank of a map.

Entry i enters layer l of a request with three numbers (design: the general form; the paper's Eq. inject_rewrite is
`weighting="sqrt"` with zero layer bias):

    logit = key_scale_i * (q . k) * softmax_scale + log_weight_i + layer_bias_l
    value = value_scale_i * gate_l * v
    map   = exp(log_weight_i) * value_scale_i * gate_l * map_out map_in o, for the output o [G D] of each KV head

Memory keys are not rotated, and queries are: memory is at position 0, and the request's positions do not change.

Latent attention (MLA) has one latent for all heads, and so has its memory: J = 1, keys of D numbers and values of
V < D. Queries [N + Z] are taken into the space of latents, and what they read is taken out: see `attend_latents`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.retrieval.entry_terms import Form, Weighting

ATTENTION_NAME = "inducekv"


@dataclass(frozen=True)
class Terms:
    """Each request's terms for each entry; a `log_weight` of -inf leaves the entry out."""

    key_scale: Tensor  # [n, B]
    log_weight: Tensor  # [n, B]
    value_scale: Tensor  # [n, B]
    log_remainder: Tensor  # [n], the logit, without the layer bias, of one more token of value 0; -inf: no such token
    # [n] int64, decoupled memory only: the first position that memory acts on; None for all positions.
    first_active: Tensor | None = None

    def on(self, device: torch.device) -> Terms:
        """The same on this device."""
        return Terms(
            self.key_scale.to(device),
            self.log_weight.to(device),
            self.value_scale.to(device),
            self.log_remainder.to(device),
            None if self.first_active is None else self.first_active.to(device),
        )


@dataclass(frozen=True)
class TensorMemory:
    """A memory as tensors, any of which may require gradients."""

    retrieval_keys: Tensor  # [B, d]
    payload_keys: Tensor  # [L, B, J, m, D], before RoPE
    payload_values: Tensor  # [L, B, J, m, V]
    temperature: Tensor  # []
    value_gates: Tensor  # [L]
    layer_bias: Tensor  # [L]
    weighting: Weighting
    form: Form = "merged"
    map_in: Tensor | None = None  # [L, B, J, r, G D]
    map_out: Tensor | None = None  # [L, B, J, G D, r]
    layers: tuple[int, ...] | None = None  # [L], the model's that these are; None: all that memory may act in

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> TensorMemory:
        return cls(
            retrieval_keys=bundle.retrieval_keys.to(device, dtype),
            payload_keys=bundle.payload_keys.to(device, dtype),
            payload_values=bundle.payload_values.to(device, dtype),
            temperature=bundle.temperature.to(device, dtype),
            value_gates=bundle.value_gates.to(device, dtype),
            layer_bias=bundle.layer_bias.to(device, dtype),
            weighting=bundle.metadata.weighting,
            form=bundle.metadata.form,
            map_in=None if bundle.map_in is None else bundle.map_in.to(device, dtype),
            map_out=None if bundle.map_out is None else bundle.map_out.to(device, dtype),
            layers=bundle.metadata.layers,
        )

    def place_of(self, layer: int) -> int | None:
        """Where the payloads of this layer of the model are; None: the memory does nothing there."""
        if self.layers is None:
            return layer
        return self.layers.index(layer) if layer in self.layers else None

    def of_layer(self, place: int, device: torch.device) -> TensorMemory:
        """The payloads of one layer alone, which are at place 0, on this device; gradients reach this memory."""
        one = slice(place, place + 1)
        return replace(
            self,
            payload_keys=self.payload_keys[one].to(device),
            payload_values=self.payload_values[one].to(device),
            value_gates=self.value_gates[one].to(device),
            layer_bias=self.layer_bias[one].to(device),
            map_in=None if self.map_in is None else self.map_in[one].to(device),
            map_out=None if self.map_out is None else self.map_out[one].to(device),
        )

    def terms(
        self,
        query_keys: Tensor,
        *,
        top_k: int | None = None,
        remainder: bool = False,
        log_prior: Tensor | None = None,
    ) -> Terms:
        """Retrieve: softmax over all B entries, or over the `top_k` with the highest scores.

        Args:
            query_keys: [n, d], unit norm.
            remainder: for "sqrt" only: the other entries stay in attention as tokens of logit 0 and value 0.
            log_prior: [B] or [n, B], added to the retrieval logits; -inf leaves an entry out.
        """
        scores = query_keys.to(self.retrieval_keys) @ self.retrieval_keys.T  # [n, B]
        logits = scores / self.temperature
        if log_prior is not None:
            logits = logits + log_prior
        # A stable sort: ties go to the first entry of the memory.
        rank = logits.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # [n, B]
        left_out = rank >= (top_k if top_k is not None else logits.shape[1])  # [n, B] bool
        log_alpha = logits.masked_fill(left_out, -math.inf).log_softmax(dim=1)  # [n, B]

        num_left_out = left_out.sum(dim=1).to(logits)  # [n]
        m = self.payload_keys.shape[3]
        if self.weighting == "prior":
            ones = torch.ones_like(log_alpha)
            return Terms(ones, log_alpha, ones, torch.full_like(num_left_out, -math.inf))
        if self.weighting == "uniform":
            ones = torch.ones_like(log_alpha)
            used = torch.zeros_like(log_alpha).masked_fill(log_alpha == -math.inf, -math.inf)
            return Terms(ones, used, ones, torch.full_like(num_left_out, -math.inf))
        # exp(log / 2), not sqrt: its gradient is finite at alpha = 0.
        scale = (0.5 * log_alpha).exp()
        log_weight = torch.zeros_like(scale).masked_fill(left_out, -math.inf)
        log_remainder = (num_left_out * m).log() if remainder else torch.full_like(num_left_out, -math.inf)
        return Terms(scale, log_weight, scale, log_remainder)


_injected: ContextVar[tuple[TensorMemory, Terms] | None] = ContextVar("injected", default=None)


@contextlib.contextmanager
def injected(memory: TensorMemory, terms: Terms) -> Iterator[None]:
    """Within the context, forward passes of a `Backbone` over n requests attend to the memory with their terms."""
    token = _injected.set((memory, terms))
    try:
        yield
    finally:
        _injected.reset(token)


def attention_with(
    attend_merged: Callable[..., Tensor], decoupled: Callable[..., Tensor]
) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers that injects memory of either form, if there is any.

    Without memory, and before its first active token, it is transformers' own, bit for bit; with a soft cap or sinks,
    the formula of transformers' eager one.

    Args:
        attend_merged: computes merged attention, as `attend`.
        decoupled: computes what decoupled memory adds, as `attend_decoupled`.
    """

    def attention(
        module: torch.nn.Module,
        query: Tensor,  # [n, H, T, D], rotated
        key: Tensor,  # [n, J, S, D], rotated
        value: Tensor,  # [n, J, S, D]
        attention_mask: Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        active, number = _injected.get(), getattr(module, "memory_layer", None)
        layer = None if active is None or number is None else active[0].place_of(number)
        if active is None or layer is None:
            return own_attention(module, query, key, value, attention_mask, scaling, **kwargs), None
        memory, terms = active
        assert terms.key_scale.shape == (query.shape[0], memory.retrieval_keys.shape[0])
        refused = ("position_bias",)  # decoupled memory does not see the mask, which has the window
        for name in refused if memory.form == "decoupled" else (*refused, "softcap", "s_aux", "sliding_window"):
            if kwargs.get(name) is not None:
                raise UnsupportedModel(f"memory cannot be injected into attention with {name}")
        if memory.payload_keys.device != query.device:
            memory, terms = memory.of_layer(layer, query.device), terms.on(query.device)
            layer = 0
        if memory.form == "decoupled":
            own = own_attention(module, query, key, value, attention_mask, scaling, **kwargs)
            with torch.autocast(query.device.type, enabled=False):
                if hasattr(module, "kv_b_proj"):
                    added = attend_latents(module, decoupled, query, scaling, memory, terms, layer)
                else:
                    added = decoupled(query, scaling, memory, terms, layer)  # [n, T, H, D]
                if memory.map_in is not None:
                    added = added + mapped(own, memory, terms, layer)
            with_memory = own + added.to(own.dtype)
            acts = _acts(terms.first_active, query, key)
            return with_memory if acts is None else torch.where(acts, with_memory, own), None
        visible = _visible(attention_mask, query, key)
        # Attention over memory runs in at least float32, whatever precision the model's products have.
        with torch.autocast(query.device.type, enabled=False):
            output = attend_merged(query, key, value, visible, scaling, memory, terms, layer)
        return output.to(query.dtype), None

    return attention


def own_attention(
    module: torch.nn.Module,
    query: Tensor,  # [n, H, T, D], rotated
    key: Tensor,  # [n, J, S, D], rotated
    value: Tensor,  # [n, J, S, D]
    attention_mask: Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,  # c: logits are c tanh(logits / c)
    s_aux: Tensor | None = None,  # [H], the logits of sinks: a token more, of value 0
    **kwargs: Any,
) -> Tensor:
    """The model's self-attention: [n, T, H, D]."""
    if softcap is None and s_aux is None:
        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]
        return output
    n, H, T, D = query.shape
    J, S = key.shape[1:3]
    logits = torch.einsum("njgtd,njsd->njgts", query.reshape(n, J, H // J, T, D), key) * scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    # Finite: a row of padding sees nothing.
    least = torch.finfo(logits.dtype).min
    logits = logits.masked_fill(~_visible(attention_mask, query, key)[:, None, None], least)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.view(1, J, H // J, 1, 1).expand(n, -1, -1, T, 1).to(logits.dtype)], dim=-1)
    share = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))[..., :S].to(value.dtype)
    return torch.einsum("njgts,njsd->njgtd", share, value).reshape(n, H, T, D).transpose(1, 2)


def attend(
    query: Tensor,  # [n, H, T, D]
    key: Tensor,  # [n, J, S, D]
    value: Tensor,  # [n, J, S, D]
    visible: Tensor,  # [n or 1, T, S] bool: which tokens of the request a query may see
    scaling: float,
    memory: TensorMemory,
    terms: Terms,
    layer: int,
) -> Tensor:
    """One softmax over [memory ; remainder ; self], in at least float32. Returns [n, T, H, D]."""
    n, H, T, D = query.shape
    J, S = key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    query = query.to(dtype).view(n, J, H // J, T, D)
    key, value = key.to(dtype), value.to(dtype)

    memory_logits = _memory_logits(query, scaling, memory, terms, layer)  # [n, J, G, T, B, m]
    bias = memory.layer_bias[layer].to(dtype)
    remainder_logits = (terms.log_remainder.to(dtype) + bias)[:, None, None, None, None]
    remainder_logits = remainder_logits.expand(n, J, H // J, T, 1)
    self_logits = torch.einsum("njgtd,njsd->njgts", query, key) * scaling  # [n, J, G, T, S]
    self_logits = self_logits.masked_fill(~visible[:, None, None], -math.inf)

    logits = torch.cat([memory_logits.flatten(-2), remainder_logits, self_logits], dim=-1)
    share = logits.softmax(dim=-1)  # [n, J, G, T, B m + 1 + S]
    output = _memory_values(share[..., : -1 - S].view_as(memory_logits), memory, terms, layer)
    output = output + torch.einsum("njgts,njsd->njgtd", share[..., -S:], value)
    return output.reshape(n, H, T, D).transpose(1, 2)


def attend_decoupled(
    query: Tensor,  # [n, H, T, D]
    scaling: float,
    memory: TensorMemory,
    terms: Terms,
    layer: int,
) -> Tensor:
    """value_gate softmax([memory logits ; 0]) [memory values ; 0], in at least float32. Returns [n, T, H, V]."""
    n, H, T, D = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    J = memory.payload_keys.shape[2]
    query = query.to(dtype).view(n, J, H // J, T, D)
    memory_logits = _memory_logits(query, scaling, memory, terms, layer)  # [n, J, G, T, B, m]
    logits = torch.nn.functional.pad(memory_logits.flatten(-2), (0, 1))  # [n, J, G, T, B m + 1]
    share = logits.softmax(dim=-1)[..., :-1].view_as(memory_logits)
    return _memory_values(share, memory, terms, layer).reshape(n, H, T, -1).transpose(1, 2)


def attend_latents(
    module: Any,
    decoupled: Callable[..., Tensor],
    query: Tensor,  # [n, H, T, N + Z]
    scaling: float,
    memory: TensorMemory,
    terms: Terms,
    layer: int,
) -> Tensor:
    """What a memory of latents adds to the attention of `module`, in at least float32. Returns [n, T, H, O].

    Its keys have the part that is rotated in the order of the checkpoint, pairs side by side, as vLLM has it.
    transformers' DeepSeek-V3 puts the halves of its queries one behind the other.
    """
    H, N = query.shape[1], module.qk_nope_head_dim
    dtype = torch.promote_types(query.dtype, torch.float32)
    projection = module.kv_b_proj.weight.to(dtype).view(H, N + module.v_head_dim, -1)  # [H, N + O, V]
    nope, rotated = query[..., :N].to(dtype), query[..., N:].to(dtype)
    if getattr(module.config, "rope_interleave", False):
        rotated = torch.stack(rotated.chunk(2, dim=-1), dim=-1).flatten(-2)
    absorbed = torch.cat([torch.einsum("nhtp,hpv->nhtv", nope, projection[:, :N]), rotated], dim=-1)  # [n, H, T, D]
    read = decoupled(absorbed, scaling, memory, terms, layer)  # [n, T, H, V]
    return torch.einsum("nthv,hov->ntho", read, projection[:, N:])


def mapped(output: Tensor, memory: TensorMemory, terms: Terms, layer: int) -> Tensor:
    """What the maps add to self-attention's output [n, T, H, D], computed in at least float32: [n, T, H, D]."""
    assert memory.map_in is not None
    assert memory.map_out is not None
    n, T, H, D = output.shape
    dtype = torch.promote_types(output.dtype, torch.float32)
    map_in, map_out = memory.map_in[layer].to(dtype), memory.map_out[layer].to(dtype)
    J, width = map_in.shape[1], map_in.shape[3]
    blocks = output.to(dtype).reshape(n, T, J, width)
    inner = torch.einsum("ntjc,bjrc->ntjbr", blocks, map_in)
    weight = memory.value_gates[layer].to(dtype) * terms.log_weight.to(dtype).exp() * terms.value_scale.to(dtype)
    inner = inner * weight[:, None, None, :, None]
    return torch.einsum("ntjbr,bjcr->ntjc", inner, map_out).reshape(n, T, H, D)


def _memory_logits(query: Tensor, scaling: float, memory: TensorMemory, terms: Terms, layer: int) -> Tensor:
    """Logits of the memory tokens, [n, J, G, T, B, m], for query [n, J, G, T, D]."""
    dtype = query.dtype
    logits = torch.einsum("njgtd,bjmd->njgtbm", query, memory.payload_keys[layer].to(dtype)) * scaling
    logits = logits * _per_entry(terms.key_scale, dtype) + _per_entry(terms.log_weight, dtype)
    return logits + memory.layer_bias[layer].to(dtype)


def _memory_values(share: Tensor, memory: TensorMemory, terms: Terms, layer: int) -> Tensor:
    """What the shares [n, J, G, T, B, m] take from the memory: [n, J, G, T, V]."""
    dtype = share.dtype
    share = share * _per_entry(terms.value_scale, dtype)
    values = torch.einsum("njgtbm,bjmd->njgtd", share, memory.payload_values[layer].to(dtype))
    return memory.value_gates[layer].to(dtype) * values


def _per_entry(term: Tensor, dtype: torch.dtype) -> Tensor:  # [n, B] -> [n, 1, 1, 1, B, 1]
    return term.to(dtype)[:, None, None, None, :, None]


def _acts(first_active: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """[n, T, 1, 1] bool: which query tokens memory acts on; None for all of them."""
    if first_active is None:
        return None
    T, S = query.shape[2], key.shape[2]
    position = torch.arange(S - T, S, device=query.device)  # [T]
    return (position >= first_active.to(position.device)[:, None])[:, :, None, None]


def _visible(attention_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """transformers' mask as [n or 1, T, S] bool; None stands for causal masking."""
    if attention_mask is None:
        T, S = query.shape[2], key.shape[2]
        return torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)[None]
    assert attention_mask.dtype == torch.bool
    assert attention_mask.shape[1] == 1
    return attention_mask[:, 0, :, : key.shape[2]]


attention = attention_with(attend, attend_decoupled)
AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
