"""Decoupled memory in multi-head latent attention (MLA): tokens as latents, one for all heads, as in its KV cache.

A memory token is a key [D] of the latent and the part that RoPE rotates, and a value [V], a latent. A head's query is
taken into the space of latents, as the layer itself does for its decodes; what it reads there is taken out by the
layer's own W_UV:

    q' = [q_nope W_UK ; q_rope]    output + value_gate (softmax([q' K scale ; 0]) [V ; 0]) W_UV

The layer is vLLM's `MLAAttention`: its `forward_impl` has the rotated, not absorbed queries of prompts and decodes.

Shapes: R rows, H heads of this rank, N and Z size of a head's query without and with rotation, D = V + Z size of a
memory token's key and V of its value, O size of a head's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import UnsupportedModel
from .attach import AddsMemory

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import MLAAttention


class AddsLatentMemory(AddsMemory, Protocol):
    """What the layers ask in every forward pass."""

    def add_latent(self, layer: int, latents: LatentLayer, query: Tensor, output: Tensor) -> None:
        """Add the step's memory to the output of a layer's self-attention, in place.

        Args:
            query: [rows, H, N + Z], rotated; rows beyond those of the step are padding.
            output: [rows, H O].
        """
        ...


class LatentLayer:
    """The way of a layer's queries into the space of latents, and of what they read there out of it."""

    def __init__(self, name: str, layer: MLAAttention) -> None:
        """Raises UnsupportedModel: the layer keeps its projections in another form."""
        projections = [getattr(layer, part, None) for part in ("W_UK_T", "W_UV")]
        if not all(isinstance(each, Tensor) and each.dtype.is_floating_point for each in projections):
            raise UnsupportedModel(
                f"memory cannot be served: layer {name} uses {type(layer.impl).__name__}, which keeps the projections "
                "of latents packed; on a CPU, start with --attention-backend CPU_MLA"
            )
        self._layer: Any = layer  # which may get other projections when vLLM loads its weights again
        self.scale = float(layer.scale)
        self.value_size = layer.kv_lora_rank

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries [R, H, N + Z] in the space of a memory's keys: [R, H, D]."""
        N = self._layer.qk_nope_head_dim
        taken_in = torch.bmm(query[..., :N].transpose(0, 1), self._layer.W_UK_T)  # [H, R, V]
        return torch.cat([taken_in.transpose(0, 1), query[..., N:]], dim=-1)

    def add(self, read: Tensor, output: Tensor) -> None:
        """Add what was read, [R, H, V], to the output [R, H O] in place.

        Where the result is not finite, memory counts as zero.
        """
        added = torch.bmm(read.transpose(0, 1), self._layer.W_UV).transpose(0, 1)  # [R, H, O]
        result = output + added.reshape(output.shape)
        output.copy_(torch.where(result.isfinite(), result, output))


def attach_latent(name: str, layer: Any, number: int, memory: AddsLatentMemory) -> None:
    """Make an `MLAAttention` add memory to its output, and keep numbers that are not finite out of its cache.

    Raises:
        UnsupportedModel: the layer's backend keeps its projections in a form that memory cannot use.
    """
    latents = LatentLayer(name, layer)
    own_update, own_forward = layer.update_kv_cache, layer.forward_impl

    def update_kv_cache(kv_c_normed: Tensor, k_pe: Tensor, *args: Any, **kwargs: Any) -> None:
        own_update(*memory.cacheable(number, kv_c_normed, k_pe), *args, **kwargs)

    def forward_impl(
        q: Tensor, k_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor, **kwargs: Any
    ) -> Tensor:
        result: Tensor = own_forward(q, k_c_normed, k_pe, kv_cache, attn_metadata, output, **kwargs)
        if attn_metadata is None:  # profiling
            return result
        if (decide := memory.deciding.pop(number, None)) is not None:
            decide()  # memory may act from this layer on
        if memory.acts(number, len(q)):
            memory.add_latent(number, latents, q, output)
        return result

    # vLLM looks them up on the layer in every forward pass.
    layer.update_kv_cache, layer.forward_impl = update_kv_cache, forward_impl
