"""What a worker refuses to load, and as which error."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..attention.memory_attention import MemoryAttention, dtype_of
from ..bundle import Bundle, check_magnitudes
from ..errors import BundleError, CapacityError, InduceKVError, UnsupportedModel
from ..facts.pictures import LAYER
from ..vllm_seams.requirements import check_maps
from .cached_values import CachedValues

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
    if bundle.metadata.has_pictures and (reason := values.refusal(LAYER)) is not None:
        raise UnsupportedModel(f"facts with pictures need the values of layer {LAYER}: {reason}")
    if bundle.metadata.facts and config.speculative_config is not None:
        raise UnsupportedModel("facts cannot be served with speculative decoding: vLLM takes no logits processor")


def check_most_entries(bundle: Bundle, most: int) -> None:
    """Refuse a bundle of which one request may read more entries. Raises CapacityError."""
    tasks = Counter(entry.task for entry in bundle.metadata.entries)
    read = bundle.num_entries if bundle.gate is None else max(tasks.values())  # a gate opens for one task
    if read > most:
        raise CapacityError(
            f"a request may read {read} entries of the bundle, and {most} fit a slot; start the server with a larger "
            "memory_request_entries"
        )


def kind_of(error: BaseException) -> str:
    """The class, by its name in `errors`, that the API process raises for what ended a load."""
    if isinstance(error, MemoryError):
        return CapacityError.__name__
    return type(error).__name__ if isinstance(error, InduceKVError) else BundleError.__name__
