"""vLLM's CPU attention backend with memory attention for rows that have memory.

It replaces the built-in backend, because vLLM's CPU platform ignores `--attention-backend`. Without memory it only
calls the built-in implementation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionLayer, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from ...errors import UnsupportedModel
from ...vllm_seams.config import InduceKVConfig
from ..cpu_ops import finite_or, is_sum_finite
from ..resident_bundle import LayerMemory
from ..slots import ActingRows
from . import cpu
from .merge import merge_memory
from .step import DecodeBatch, PrefillSpan, ScheduledStep, StepMemory, plan_step

# Kernels whose K blocks are plain [D, C]; this backend cannot read the interleaved ones (VNNI, BFMMLA).
READABLE_ISAS = ("vec", "vec16")


@dataclass
class MemoryAttentionMetadata(CPUAttentionMetadata):
    """The platform's metadata plus the rows with memory in this step; None if there are none."""

    memory: StepMemory | None = None


class InduceKVCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return InduceKVCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return InduceKVCPUMetadataBuilder


class InduceKVCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Adds the step's merged memory to the platform's metadata. The worker sets `merged_rows`."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.merged_rows: Callable[[], Sequence[ActingRows]] = lambda: ()  # of the running step
        if InduceKVConfig.from_vllm(vllm_config) is not None and self.isa not in READABLE_ISAS:
            # Set before the first key is written, so that every block of this cache is readable.
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not (acting := self.merged_rows()):
            return base
        step = ScheduledStep(
            acting,
            seq_lens=base.seq_lens.tolist(),
            block_table=base.block_table,
            block_size=self.block_size,
            heads_per_kv_head=self.num_heads // self.num_kv_heads,
        )
        return MemoryAttentionMetadata(**{f.name: getattr(base, f.name) for f in fields(base)}, memory=plan_step(step))


class InduceKVCPUImpl(CPUAttentionBackendImpl):
    _layer_index: int | None = None

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the base output [rows, H, D] in place, then merge memory into the rows that have it.

        A short prompt that has the step for itself attends to both at once.
        """
        step: StepMemory | None = getattr(attn_metadata, "memory", None)
        if step is None or self.attn_type != AttentionType.DECODER:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if self._layer_index is None:
            self._layer_index = extract_layer_index(layer.layer_name)  # type: ignore[attr-defined]
        if (span := step.only_span(len(query))) is not None:
            stored = span.memory.bundle.layers[self._layer_index]
            whole = cpu.short_prompt_attention(query, key, value, stored, span, self.scale)
            if is_sum_finite(whole):
                return output.copy_(whole)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        self._add_memory(step, self._layer_index, query, key, value, kv_cache, output)
        return output

    def _add_memory(
        self,
        step: StepMemory,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        output: Tensor,
    ) -> None:
        for span in step.prefills:
            stored = span.memory.bundle.layers[layer_index]
            q, k, v, own = (each[span.rows] for each in (query, key, value, output))
            if span.whole_mask is None:
                output[span.rows] = self._prefill(span, stored, q, k, kv_cache, own)
            else:
                output[span.rows] = finite_or(cpu.short_prompt_attention(q, k, v, stored, span, self.scale), own)
        for batch in step.decodes:
            stored = batch.bundle.layers[layer_index]
            output[batch.rows] = self._decode(batch, stored, query[batch.rows], kv_cache, output[batch.rows])

    def _prefill(
        self, span: PrefillSpan, stored: LayerMemory, query: Tensor, key: Tensor, kv_cache: Tensor, self_output: Tensor
    ) -> Tensor:
        memory_output, memory_lse = cpu.prefill_memory_attention(query, stored, span.memory, self.scale)
        self_lse = cpu.prefill_self_lse(query, key, kv_cache, span, self.scale)
        remainder = span.memory.log_remainder if span.memory.has_remainder else None
        merged = merge_memory(
            self_output, self_lse, memory_output, memory_lse, stored.value_gate, stored.bias, remainder
        )
        return finite_or(merged.to(self_output.dtype), self_output)

    def _decode(
        self, batch: DecodeBatch, stored: LayerMemory, query: Tensor, kv_cache: Tensor, self_output: Tensor
    ) -> Tensor:
        memory_output, memory_lse = cpu.decode_memory_attention(query, stored, batch, self.scale)
        self_lse = cpu.decode_self_lse(query, kv_cache, batch, self.scale)
        remainder = batch.log_remainder
        merged = merge_memory(
            self_output, self_lse, memory_output, memory_lse, stored.value_gate, stored.bias, remainder
        )
        return finite_or(merged.to(self_output.dtype), self_output)


def probe_packed_layout(isa: str, dtype: torch.dtype, head_size: int, block_size: int) -> None:
    """Write test keys with the kernel's own function and read them back through `cpu.packed_keys`.

    Raises:
        UnsupportedModel: the kernel packs its blocks in a layout that this backend cannot read.
    """
    kv_cache = torch.zeros(2, 1, block_size, 2 * head_size, dtype=dtype)  # [blocks, J, C, 2 D]
    key_cache, value_cache = kv_cache.view(2, 1, 2 * block_size, head_size).chunk(2, dim=2)
    keys = torch.arange(block_size * head_size).remainder(251).to(dtype).view(block_size, 1, head_size)  # [C, J, D]
    slots = torch.arange(block_size, 2 * block_size)
    arguments: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    ops.cpu_attn_reshape_and_cache(keys, keys, key_cache, value_cache, slots, isa, **arguments)
    if not torch.equal(cpu.packed_keys(kv_cache)[1], keys.permute(1, 2, 0)):
        raise UnsupportedModel(
            f"the CPU attention kernel {isa!r} packs its key blocks (dtype {dtype}, head size {head_size}, "
            f"block size {block_size}) in a layout that InduceKV does not read"
        )
