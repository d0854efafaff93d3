"""What a worker asks of the memory attention of its platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from ..errors import UnsupportedModel
from .attach import attach
from .latent import AddsLatentMemory, attach_latent

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ..vllm_seams.runner import StepRows
    from .slots import ActingRows, RequestMemory


AttentionLayer = Attention | MLAAttention
# On GPUs, of one request: each slot's tables have 24 bytes for each of them, 50 MB for vLLM's 256 requests.
MOST_REQUEST_ENTRIES = 4096


class MemoryAttention(Protocol):
    """Memory attention in the layers of a worker."""

    merged_refusal: UnsupportedModel | None  # why merged memory cannot be served here; decoupled memory always can
    most_entries: int | None  # that one request may read; None: any number

    def attach(self, kv_cache: KVCacheConfig, layers: Mapping[str, AttentionLayer], builders: Sequence[Any]) -> None:
        """Act on these layers from now on; `builders` make their attention metadata. Called once, at start."""
        ...

    def cached_values(self, kv_cache: Tensor) -> Tensor:
        """The values [blocks, J, C, D] in a layer's KV cache, as a view."""
        ...

    def warm_up(self) -> None:
        """Compile what steps need, before vLLM captures graphs. Raises UnsupportedModel if the device cannot run it."""
        ...

    def fill(self, memory: RequestMemory) -> None:
        """A slot is about to be read, and this is what it reads."""
        ...

    def begin_step(self, rows: StepRows, acting: Sequence[ActingRows]) -> None:
        """Take the step's rows that memory acts on, in their order, before its attention metadata is built.

        A step without a graph may be begun again in a layer's forward pass, if decoupled memory has joined.
        """
        ...

    def decide_in(self, layer: int, decide: Callable[[], None]) -> None:
        """Call `decide` in this layer of the running step, before its memory acts. Its values are in the KV cache."""
        ...

    def end_step(self) -> None:
        """The step's forward pass has run, or is queued on the device."""
        ...


def attach_to_decoders(layers: Mapping[str, AttentionLayer], memory: AddsLatentMemory) -> None:
    """Let memory act on every causal layer. Raises UnsupportedModel: one keeps what memory needs in another form."""
    for number, name in enumerate(decoders(layers)):
        layer = layers[name]
        if isinstance(layer, MLAAttention):
            attach_latent(name, layer, number, memory)
        else:
            attach(layer.impl, number, memory)


def decoders(layers: Mapping[str, AttentionLayer]) -> list[str]:
    """The causal layers in order: memory's layer 0 is the first of them."""
    causal = (
        name
        for name, layer in layers.items()
        if isinstance(layer, MLAAttention) or layer.attn_type == AttentionType.DECODER
    )
    return sorted(causal, key=extract_layer_index)


def require_layers(layers: Mapping[str, AttentionLayer], expected: Sequence[int]) -> None:
    """Check that the causal layers are those with attention by the model's configuration.

    Raises:
        UnsupportedModel: names what was expected and found.
    """
    found = [extract_layer_index(name) for name in decoders(layers)]
    if found != list(expected):
        raise UnsupportedModel(
            f"by its configuration the model has attention in the layers {list(expected)}, vLLM has it in {found}"
        )


def dtype_of(model: ModelConfig) -> torch.dtype:
    dtype = model.dtype
    assert isinstance(dtype, torch.dtype)  # vLLM resolves "auto" before it starts a worker
    return dtype
