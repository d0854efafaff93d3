"""vLLM's FlashAttention backend, which also gives the log-sum-exp of self-attention to merged memory.

FlashAttention computes it anyway and vLLM drops it. Without merged memory in a step, the implementation only calls
vLLM's own.
"""

from typing import Any, cast

from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from ...vllm_seams.config import InduceKVConfig
from ..attach import KeepsLse


class InduceKVFlashBackend(FlashAttentionBackend):
    """Its name stays FLASH_ATTN, because vLLM looks backends up by name."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return InduceKVFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return InduceKVFlashMetadataBuilder


class InduceKVFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """An engine with memory puts attention into graphs of decode steps alone.

        A graph of a mixed step would launch a program for each of its rows, whether it has memory or not.
        """
        own = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if InduceKVConfig.from_vllm(vllm_config) is None:
            return own
        return min(own, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)


class InduceKVFlashImpl(KeepsLse, FlashAttentionImpl):
    @property
    def lse_refusal(self) -> str | None:
        """Why its log-sum-exp cannot be had."""
        return "FlashAttention 4's kernel for head size 256" if self.fa4_hd256 else None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the base output [rows, H, D] in place."""
        if not self.keeps_lse:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        self.self_lse = self._attend(layer, query, kv_cache, attn_metadata, output)
        return output

    def _attend(
        self, layer: Any, query: Tensor, kv_cache: Tensor, metadata: FlashAttentionMetadata, output: Tensor
    ) -> Tensor:
        """What vLLM's `forward` does for causal attention over the whole cache, with its log-sum-exp [rows, H].

        `check_merged` has refused every other kind.
        """
        halves: Any = kv_cache.transpose(1, 2)
        keys, values = (
            canonicalize_singleton_dim_strides(half) for half in halves.split(self.head_size, dim=-1)
        )  # [blocks, C, J, D]
        rows = metadata.num_actual_tokens
        scales = (metadata.query_start_loc.shape[0] - 1, self.num_kv_heads)
        attend: Any = vars(flash_attn)["flash_attn_varlen_func"]
        _, lse = attend(
            q=query[:rows],
            k=keys,
            v=values,
            out=output[:rows],
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=metadata.causal,
            alibi_slopes=self.alibi_slopes,
            window_size=list(self.sliding_window),
            block_table=metadata.block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=metadata.scheduler_metadata,
            fa_version=self.vllm_flash_attn_version,
            q_descale=layer._q_scale.expand(scales) if self.supports_quant_query_input else None,
            k_descale=layer._k_scale.expand(scales),
            v_descale=layer._v_scale.expand(scales),
            num_splits=metadata.max_num_splits,
            s_aux=self.sinks,
            return_softmax_lse=True,
        )
        return cast(Tensor, lse).T  # FlashAttention's is [H, rows]
