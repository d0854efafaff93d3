"""Faults of vLLM itself on CPUs, with memory and without: what would be answered wrongly is refused at start.

Each refusal names the version that the fault was seen in and where it is reported. Once vLLM has mended it, the fault's
test in `tests/engine/test_known_bugs.py`, which shows it without InduceKV, fails: then it gets that version, and goes
when no older one is served.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import vllm
from packaging.version import Version

from ..errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Fault:
    """Something that vLLM does wrongly on CPUs."""

    seen: str  # the version of vLLM
    report: str | None  # an issue or pull request of vllm-project/vllm; None: nobody has reported it
    mended: str | None = None  # the first version without it

    @property
    def is_here(self) -> bool:
        """Whether the vLLM that runs us has it."""
        return self.mended is None or Version(vllm.__version__) < Version(self.mended)

    def refusal(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{reason} ({self})")

    def __str__(self) -> str:
        return f"vLLM {self.seen}, " + (f"vllm-project/vllm{self.report}" if self.report else "not reported")


ADAPTERS: Final = Fault(
    "0.32", "#48421", "0.33"
)  # requests without an adapter get another one's: `workers/cpu_lora.py`
DRAFTS: Final = Fault("0.32", "#39273")
EXPERT_PARALLEL: Final = Fault("0.32", "#57837")
FOUR_BITS: Final = Fault("0.32", "#55613")
MAMBA_2: Final = Fault("0.32", None)
PREFIX_MATCH: Final = Fault("0.32", None)
ROTATION: Final = Fault("0.32", None)
ROUTER: Final = Fault("0.32", None)


CPU_BLOCK: Final = 128  # tokens, unless the user says otherwise


# ---- known from the flags --------------------------------------------------------------------------------------------


def check_flags(config: VllmConfig) -> None:
    """Refuse flags with which an engine on CPUs is wrong.

    Raises:
        UnsupportedModel: names the flag.
    """
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    if not current_platform.is_cpu():
        return
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1:
        raise EXPERT_PARALLEL.refusal(
            "InduceKV cannot serve memory with --enable-expert-parallel on CPUs: vLLM's kernel for experts there knows "
            "those of one rank, and its first request ends the engine"
        )
    if config.model_config.is_hybrid:
        check_states(config, *_expected_states(config))


def may_mix_adapters(config: VllmConfig) -> bool:
    """Whether adapters and requests without one can share a batch of this engine: see `workers/cpu_lora.py`."""
    from vllm.platforms import current_platform

    if config.lora_config is None:
        return False
    return config.model_config.enforce_eager or not current_platform.is_cpu() or not ADAPTERS.is_here


def _expected_states(config: VllmConfig) -> tuple[int, bool]:
    """The tokens of a block of a hybrid's states, as vLLM will have them, and whether they are Mamba 2's."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    expected = copy.copy(config)
    expected.cache_config = cache = copy.copy(config.cache_config)
    if not cache.user_specified_block_size:  # since 0.33, vLLM waits with its own choice until there are layers
        cache.block_size = max(cache.block_size, CPU_BLOCK)
    current_platform._align_hybrid_block_size(expected, AttentionBackendEnum.CPU_ATTN.get_class())
    text = config.model_config.hf_text_config
    has_chunks = any(getattr(text, name, None) for name in ("mamba_chunk_size", "chunk_size"))  # Mamba 2 alone
    return cache.mamba_block_size or cache.block_size, has_chunks


def check_kv_cache(kv_cache: KVCacheConfig, config: VllmConfig) -> None:
    """`check_states` of the blocks that the engine has."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    for group in kv_cache.kv_cache_groups:
        if isinstance(spec := group.kv_cache_spec, MambaSpec):
            check_states(config, spec.block_size, spec.mamba_type is MambaAttentionBackendEnum.MAMBA2)


def check_states(config: VllmConfig, block: int, is_mamba_2: bool) -> None:
    """Refuse what vLLM computes wrongly with the states of a hybrid.

    Args:
        block: the tokens of a block of states.

    Raises:
        UnsupportedModel: names the flag, and what to start with.
    """
    if config.speculative_config is not None:
        raise DRAFTS.refusal(
            "vLLM answers wrongly on CPUs with speculative decoding of a hybrid, or ends with an error if prefix "
            "caching is on: start without it"
        )
    cache = config.cache_config
    if cache.prefix_match_unit not in (None, block):
        raise PREFIX_MATCH.refusal(
            f"vLLM answers wrongly on CPUs with --prefix-match-unit {cache.prefix_match_unit}, which is not a whole "
            f"block of states ({block} tokens): start without it"
        )
    if is_mamba_2 and cache.mamba_cache_mode == "align" and config.scheduler_config.max_num_batched_tokens > block:
        raise MAMBA_2.refusal(
            "vLLM's Mamba 2 on CPUs ends with an error when a block of states ends within a step: start with "
            f"--max-num-batched-tokens {block}, or with --no-enable-prefix-caching"
        )


# ---- known from the layers of the model ------------------------------------------------------------------------------


def check_layers(model: nn.Module) -> None:
    """Refuse a model whose layers vLLM computes wrongly on this CPU, or not at all. Raises UnsupportedModel."""
    check_weights(model)
    check_rotation(model)
    check_experts(model)


def has_4_bit_kernel() -> bool:
    """Whether vLLM computes with 4-bit weights on this CPU."""
    import torch
    from vllm import _custom_ops  # noqa: F401  # loads the operators

    return hasattr(torch.ops._C, "cpu_gemm_wna16")


def check_weights(model: nn.Module) -> None:
    """Refuse weights that vLLM has no kernel for on this CPU: the first request would end the engine.

    Raises:
        UnsupportedModel: names the layer.
    """
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    if has_4_bit_kernel():
        return
    for name, layer in model.named_modules():
        for holder in (getattr(layer, "quant_method", None), getattr(layer, "scheme", None)):
            if isinstance(getattr(holder, "kernel", None), CPUWNA16LinearKernel):
                raise FOUR_BITS.refusal(
                    f"{name} has 4-bit weights, and vLLM has no kernel for them on this CPU (cpu_gemm_wna16, which "
                    "needs AVX-512): serve a checkpoint of 16 or 32 bits here, or this one on another machine"
                )


def check_rotation(model: nn.Module) -> None:
    """Refuse layers whose queries vLLM's operator for CPUs rotates wrongly, with memory and without.

    They are those of latent attention, whose keys have one head, and LFM2's, whose heads it takes for one.

    Raises:
        UnsupportedModel: names the layer, and the flag that cures it.
    """
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.lfm2 import Lfm2Attention
    from vllm.model_executor.models.lfm2_moe import Lfm2MoeAttention

    for name, layer in model.named_modules():
        if not isinstance(layer, MultiHeadLatentAttentionWrapper | Lfm2Attention | Lfm2MoeAttention):
            continue
        rotation = layer.rotary_emb
        used = getattr(rotation, "_forward_method", None) if isinstance(rotation, RotaryEmbedding) else None
        if getattr(used, "__func__", None) is RotaryEmbedding.forward_cpu:
            raise ROTATION.refusal(
                f"{name}: vLLM's operator for RoPE on CPUs rotates its queries wrongly, with memory and without: start "
                'with --compilation-config \'{"custom_ops": ["-rotary_embedding"]}\''
            )


def check_experts(model: nn.Module) -> None:
    """Refuse experts that vLLM's router for CPUs chooses wrongly, or ends the engine with at the first request.

    Raises:
        UnsupportedModel: names the layer, and what is missing.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    for name, layer in model.named_modules():
        router = getattr(layer, "router", None)
        if not isinstance(router, CPURouter) or router.use_grouped_topk or router.custom_routing_function is not None:
            continue
        if router.scoring_func == "sigmoid":
            raise ROUTER.refusal(
                f"{name}: vLLM's router of experts on CPUs has no sigmoid without groups, and its first request would "
                "end the engine: serve this model on a GPU"
            )
        if router.scoring_func == "softmax" and router.e_score_correction_bias is not None:
            raise ROUTER.refusal(
                f"{name}: vLLM's router of experts on CPUs leaves their bias out, with memory and without: serve this "
                "model on a GPU"
            )
