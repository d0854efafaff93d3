"""What a worker refuses to load, and as which error."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..attention.memory_attention import MOST_REQUEST_ENTRIES, MemoryAttention, dtype_of
from ..backbone.memory_layers import Heads, have_other_heads, memory_heads
from ..bundle import Bundle, OutputMap, check_magnitudes
from ..errors import BundleError, CapacityError, InduceKVError, UnsupportedModel
from .cached_values import CachedValues

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig


def check_bundle(
    bundle: Bundle, path: str, digest: str, config: VllmConfig, attention: MemoryAttention, values: CachedValues
) -> None:
    """Refuse another content than the API process has read, and what this engine cannot do.

    Args:
        path: of the bundle's file.
        digest: of the content that the API process has read.

    Raises:
        InduceKVError: names what was expected, and what was found.
    """
    if bundle.digest != digest:
        raise BundleError(f"{path} changed while it was loaded: expected digest {digest}, found {bundle.digest}")
    check_magnitudes(bundle, dtype_of(config.model_config), path)
    if attention.most_entries is not None:
        check_most_entries(bundle, attention.most_entries)
    if bundle.metadata.form == "merged" and attention.merged_refusal is not None:
        raise attention.merged_refusal
    if bundle.metadata.output_map is not None:
        check_maps(bundle.metadata.output_map, config.model_config, config.parallel_config)
    if bundle.metadata.gate is not None:
        values.check(bundle.metadata.gate.layers)
    if bundle.metadata.facts and config.speculative_config is not None:
        raise UnsupportedModel("facts cannot be served with speculative decoding: vLLM takes no logits processor")


def served_heads(model: ModelConfig) -> Heads:
    """The heads of all ranks in the layers that memory acts in, as vLLM counts them; latents are one head."""
    if model.use_mla or have_other_heads(model.hf_text_config):
        return memory_heads(model.hf_text_config)
    heads, size = model.model_arch_config.total_num_attention_heads, model.get_head_size()
    return Heads(heads, model.get_total_num_kv_heads(), size, size)


def check_maps(shape: OutputMap, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse maps of the attention output that do not fit the served model, or that a rank could not compute alone.

    Raises:
        BundleError: the width is another than that of the query heads of a KV head.
        UnsupportedModel: the ranks of tensor parallelism share KV heads.
    """
    sizes, ranks = served_heads(model), parallel.tensor_parallel_size
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    width = heads // kv_heads * sizes.head_dim
    if shape.width != width:
        raise BundleError(
            f"its maps have width {shape.width}, the {heads // kv_heads} query heads of a KV head here have {width}"
        )
    if kv_heads < ranks:
        raise UnsupportedModel(
            f"maps of the attention output need a KV head's query heads on one rank, and {ranks} ranks share {kv_heads}"
        )


def check_most_entries(bundle: Bundle, most: int) -> None:
    """Refuse a bundle of which one request may read more entries. Raises CapacityError."""
    tasks = Counter(entry.task for entry in bundle.metadata.entries)
    read = bundle.num_entries if bundle.gate is None else max(tasks.values())  # a gate opens for one task
    if read > most:
        raise CapacityError(
            f"a request may read {read} entries of the bundle, and {most} fit a slot: as many as the pool has "
            f"(--memory-pool-entries), up to {MOST_REQUEST_ENTRIES}"
        )


def kind_of(error: BaseException) -> str:
    """The class, by its name in `errors`, that the API process raises for what ended a load."""
    if isinstance(error, MemoryError):
        return CapacityError.__name__
    return type(error).__name__ if isinstance(error, InduceKVError) else BundleError.__name__
