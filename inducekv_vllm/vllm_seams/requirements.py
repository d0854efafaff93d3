"""Checks at engine start: settings and attention layers that would make memory wrong are refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedModel
from ..files.picture import WHITE
from .config import SCHEDULER_CLS
from .known_bugs import check_flags

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


STATES_KEPT = ("none", "align")  # by vLLM's prefix cache of a hybrid
DRAFTS = (
    "ngram",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
)  # drafts are made without memory, and checked with it
SLEEP = "sleep mode: what becomes of the memory pool has not been tried"


def cannot_serve(*reasons: str) -> str:
    """A refusal, with everything that it names."""
    return f"InduceKV cannot serve memory with {'; nor with '.join(reasons)}"


def check_engine(config: VllmConfig) -> None:
    """Refuse engine settings that memory does not work with.

    Raises:
        UnsupportedModel: names each setting and why memory would be wrong with it.
    """
    from vllm import envs
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    parallel, model = config.parallel_config, config.model_config
    cache_dtype = config.cache_config.cache_dtype
    scheduler = config.scheduler_config.scheduler_cls
    refusals = [
        (
            config.speculative_config is not None and config.speculative_config.method not in DRAFTS,
            f"speculative decoding by {config.speculative_config and config.speculative_config.method!r}; it has been "
            f"tried with {', '.join(DRAFTS)}",
        ),
        (
            scheduler != SCHEDULER_CLS,
            f"the scheduler {scheduler}: it would not wait for decisions; start with --scheduler-cls {SCHEDULER_CLS}",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism: only the last stage has the query key"),
        (
            parallel.data_parallel_size > 1,
            "data parallelism of a mixture of experts: its engines step together, which has not been tried",
        ),
        (parallel.decode_context_parallel_size > 1, "context parallelism: no rank sees a request's whole block table"),
        (
            config.kv_transfer_config is not None,
            "KV transfer: a connector knows blocks by their tokens, and gives a request with memory those without it",
        ),
        (
            config.ec_transfer_config is not None,
            "encoder disaggregation: a request that goes back may need its pictures again",
        ),
        (model.enable_sleep_mode, SLEEP),
        (
            model.multimodal_config is not None and model.multimodal_config.mm_processor_cache_type == "shm",
            "--mm-processor-cache-type shm: its entries are handed over once, and a request that goes back to the "
            "beginning needs its pictures again",
        ),
        (
            (others := _other_pictures(model)) is not None,
            f"--media-io-kwargs '{others}': task data's pictures are RGB and lie on white, and so must a request's",
        ),
        (envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT: memory attention shares its work out by the batch"),
        (parallel.prefill_context_parallel_size > 1, "context parallelism: no rank sees all rows of a prompt"),
        (parallel.use_ubatching, "--enable-dbo or ubatches: rows with memory are found in the whole batch"),
        (model.is_diffusion, "diffusion language models: their attention is not causal"),
        (
            bool(getattr(model.hf_text_config, "kv_lora_rank", None)) and not model.use_mla,
            "multi-head latent attention that vLLM computes from keys and values per head (VLLM_MLA_DISABLE=1 asks for "
            "that; of some models it knows no other way): memory consists of latents",
        ),
        (
            model.use_mla and hasattr(model.hf_text_config, "index_topk"),
            "sparse latent attention (DSA): vLLM has it on GPUs alone, and memory beside its selection was never tried",
        ),
        (
            model.use_mla and is_quantized_kv_cache(cache_dtype),
            f"a quantised cache of latents ({cache_dtype}): a gate reads them; start with --kv-cache-dtype auto",
        ),
        (model.is_encoder_decoder, "encoder-decoder models"),
        (
            model.quantization is not None and model.model_arch_config.quantization_config is None,
            f"weights that vLLM quantises as it loads them ({model.quantization!r}): bundles are made with the weights "
            "of a checkpoint as they are; quantise it beforehand, and teach that",
        ),
        (model.runner_type != "generate", f"the {model.runner_type!r} runner: memory acts on generation"),
        (
            config.cache_config.kv_sharing_fast_prefill,
            "--kv-sharing-fast-prefill: some layers would not see every token of a prompt",
        ),
        (
            config.cache_config.mamba_cache_mode not in STATES_KEPT,
            f"--mamba-cache-mode {config.cache_config.mamba_cache_mode}: which states it keeps is not known here; it "
            f"has been tried with {', '.join(STATES_KEPT)}",
        ),
    ]
    if found := [reason for refused, reason in refusals if refused]:
        raise UnsupportedModel(cannot_serve(*found))
    check_flags(config)


def _other_pictures(model: ModelConfig) -> str | None:
    """The settings that give a picture other pixels than `inducekv_vllm.files.picture`; None: they are the same."""
    media = model.multimodal_config.media_io_kwargs if model.multimodal_config is not None else {}
    image = media.get("image", {})
    on_white = image.get("rgba_background_color", WHITE) in (WHITE, list(WHITE))
    is_same = on_white and image.get("image_mode", "RGB") == "RGB"
    return None if is_same else json.dumps({"image": image})


def check_gpu_runner(config: VllmConfig) -> None:
    """Refuse a GPU without Triton, and a model runner that vLLM falls back to although nobody has asked for it.

    Raises:
        UnsupportedModel: says what is missing, or which runner it would be.
    """
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise UnsupportedModel("memory on a GPU needs Triton and its driver for that GPU; vLLM has found none")
    if envs.VLLM_USE_V2_MODEL_RUNNER is None and not config.use_v2_model_runner:
        raise UnsupportedModel(
            "vLLM's V2 model runner, its default, does not support these flags (vLLM's log names them): take them "
            "away; VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 runner, which vLLM means to remove"
        )


def check_merged(kv_cache: KVCacheConfig, impls: Iterable[tuple[str, Any]], ours: type, model: ModelConfig) -> None:
    """Refuse attention layers that merged memory, which shares their softmax, cannot be exact with.

    Args:
        kv_cache: the engine's KV cache.
        impls: name and implementation of every attention layer.
        ours: the class of implementations that merged memory works with on this platform.
        model: the served model.

    Raises:
        UnsupportedModel: names the layer and the feature.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, is_quantized_kv_cache

    if model.use_mla:
        raise UnsupportedModel(
            "merged memory cannot be served: it shares one softmax with keys and values per head, and multi-head "
            "latent attention (MLA) has latents; decoupled memory can"
        )
    if len(kv_cache.kv_cache_groups) != 1 or type(kv_cache.kv_cache_groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache.kv_cache_groups]
        raise UnsupportedModel(f"merged memory needs full attention in every layer; found KV caches of {kinds}")
    if model.is_mm_prefix_lm or model.rswa_window is not None:
        raise UnsupportedModel("merged memory cannot be served: the model's attention is not causal everywhere")
    for name, impl in impls:
        if not issubclass(type(impl), ours):
            raise UnsupportedModel(
                f"merged memory cannot be served: layer {name} uses {type(impl).__name__}, which does not give the "
                "log-sum-exp of its self-attention; on a GPU, start with --attention-backend FLASH_ATTN"
            )
        lse_refusal = getattr(impl, "lse_refusal", None)
        refusals = [
            (
                impl.sliding_window not in (-1, (-1, -1), None),
                f"sliding-window attention ({impl.sliding_window} tokens)",
            ),
            (impl.alibi_slopes is not None, "ALiBi: its bias depends on positions, which memory tokens do not have"),
            (impl.sinks is not None, "attention sinks"),
            (impl.logits_soft_cap not in (0, None), "a soft cap on attention logits"),
            (is_quantized_kv_cache(impl.kv_cache_dtype), "a quantised KV cache"),
            (impl.kv_sharing_target_layer_name is not None, "a KV cache shared between layers"),
            (lse_refusal is not None, lse_refusal),
        ]
        for refused, reason in refusals:
            if refused:
                raise UnsupportedModel(f"merged memory cannot be served: layer {name} has {reason}")
