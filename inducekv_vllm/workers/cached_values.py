"""The attention values of a request's tokens, read from the KV cache.

The cache holds them while the request runs, whoever has computed them: the request itself, in any chunks, or an earlier
one with the same prefix. Positions do not act on values, so these are what the layer's `v_proj` has given. Of latent
attention (MLA) they are the normed latents, without the rotated part of the key that the cache has beside them.

Shapes: t tokens, S layers, J KV heads of this rank, D head size, V size of a head's values, C tokens of a KV-cache
block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from ..attention.memory_attention import AttentionLayer, decoders
from ..errors import UnsupportedModel
from ..vllm_seams.device import Device
from .requests import Blocks

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# One scale for a whole layer; of any other quantised cache the scales lie elsewhere.
_FP8: Final = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class _Layer:
    attention: AttentionLayer
    group: int  # of the KV cache
    spec: KVCacheSpec


class CachedValues:
    """The values in the KV cache of a model's causal layers."""

    def __init__(
        self,
        kv_cache: KVCacheConfig,
        layers: Mapping[str, AttentionLayer],
        view: Callable[[Tensor], Tensor],
        device: Device,
    ) -> None:
        """`view` gives the values [blocks, J, C, D] in a layer's cache: `MemoryAttention.cached_values`."""
        self._view, self._device = view, device
        order = {name: number for number, name in enumerate(decoders(layers))}
        self._layers = {
            order[name]: _Layer(layers[name], number, _spec_of(group.kv_cache_spec, name))
            for number, group in enumerate(kv_cache.kv_cache_groups)
            for name in group.layer_names
            if name in order
        }

    def check(self, layers: Sequence[int]) -> None:
        """Refuse layers whose values cannot be had for every token of a prompt.

        Raises:
            UnsupportedModel: names the layer and the reason.
        """
        for index in layers:
            if (reason := self.refusal(index)) is not None:
                raise UnsupportedModel(
                    f"a relevance gate that looks at layer {index} cannot be served: {reason}; "
                    "fit a gate to other layers"
                )

    def refusal(self, index: int) -> str | None:
        """Why a layer's values cannot be had for every token of a prompt; None if they can."""
        if (layer := self._layers.get(index)) is None:
            return "it has no KV cache of its own"
        attention, shape = layer.attention, layer.attention.kv_cache.shape
        if isinstance(layer.spec, MLAAttentionSpec):
            return None  # the start has refused other caches of latents: see `requirements`
        if type(layer.spec) is not FullAttentionSpec:
            return f"its KV cache ({type(layer.spec).__name__}) does not keep every token of a prompt"
        if attention.kv_sharing_target_layer_name is not None:
            return f"it has the values of layer {attention.kv_sharing_target_layer_name}"
        if layer.spec.dtype.itemsize == 1 and attention.kv_cache_dtype not in _FP8:
            return f"its KV cache is quantised ({attention.kv_cache_dtype})"
        if len(shape) != 4 or (shape[1], shape[3]) != (attention.num_kv_heads, 2 * attention.head_size):
            return f"its KV cache has the unknown layout {list(shape)}"
        return None

    def read(self, layers: Sequence[int], blocks: Blocks, positions: Sequence[int]) -> Tensor:
        """The layers' values [t, S, J V] float32 of a request's tokens.

        Args:
            blocks: of each group of the KV cache, the request's blocks in order.
            positions: [t], of tokens whose K and V are in the cache, or are written by work that is queued.
        """
        return self.read_several(layers, [(blocks, positions)])

    def read_several(self, layers: Sequence[int], requests: Sequence[tuple[Blocks, Sequence[int]]]) -> Tensor:
        """`read` for several requests, one behind the other."""
        found, places = [], dict[tuple[int, int], Tensor]()  # [2, t] int64 by group and C: in which block, and where
        for index in layers:
            layer = self._layers[index]
            cache, scale = self._cache_of(layer.attention)
            kind = layer.group, cache.shape[-2]
            if kind not in places:
                of_group = [(blocks[layer.group], positions) for blocks, positions in requests]
                places[kind] = self._places(of_group, layer.spec.block_size, kind[1])
            block, offset = places[kind]
            rows = cache[block, :, offset].flatten(1) if cache.dim() == 4 else cache[block, offset]  # [t, J V]
            found.append(rows if scale is None else rows.view(_FP8[layer.attention.kv_cache_dtype]).float() * scale)
        return torch.stack(found, dim=1).float()

    def _places(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]], of_group: int, C: int) -> Tensor:
        """[2, t]; a block of the cache, of `of_group` tokens, may be several of the kernel's, of C tokens."""
        slots = []
        for blocks, positions in requests:
            at = np.asarray(positions, dtype=np.int64)
            slots.append(np.asarray(blocks, dtype=np.int64)[at // of_group] * of_group + at % of_group)
        every = np.concatenate(slots)  # [t]
        return self._device.index(np.stack([every // C, every % C]).ravel().tolist()).view(2, -1)

    def _cache_of(self, layer: AttentionLayer) -> tuple[Tensor, Tensor | None]:
        """The values [blocks, J, C, D], or latents [blocks, C, V], and the scale of quantised ones."""
        if isinstance(layer, MLAAttention):
            return layer.kv_cache[..., : layer.kv_lora_rank], None
        values = self._view(layer.kv_cache)
        return values, cast(Tensor, layer._v_scale) if values.dtype.itemsize == 1 else None


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
