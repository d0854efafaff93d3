"""The layers of a language model that memory fits: those with attention. A hybrid has others, which keep a state.

A bundle has one size for all its layers. Where layers with a sliding window have other heads than those that see all of
a prompt (Gemma 4, Step 3.7, Laguna), memory is in the latter alone. A layer that attends to the keys and values of an
earlier one has no memory either.

Everywhere else a layer's number is its place among these: in a bundle's `layers`, in the pool, in a gate's layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import UnsupportedModel
from .latents import is_latent, key_size, value_size

WITH_ATTENTION: Final = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "indexed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "minimax_m3_sparse",
        "hybrid",  # attention and a state in one layer
        "hybrid_sliding",
    }
)
WITHOUT_ATTENTION: Final = frozenset({"linear_attention", "conv", "recurrent", "moe", "mlp"})
_EARLIER_NAMES: Final = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}


WIDE: Final = 768  # hidden size from which memory is trained in another way: SmolLM2 has 576, Qwen2.5-0.5B 896
DEEP: Final = 24  # with fewer layers, a third was not measured
ONE_IN: Final = 3


def usual_layers(num_layers: int, hidden_size: int) -> tuple[int, ...] | None:
    """The layers of memory that acts on the generation: a third of a wide and deep model's, and None for all.

    What memory costs a token on a GPU is a launch in each.

    Args:
        num_layers: L, that memory may act in.
    """
    if hidden_size < WIDE or num_layers < DEEP:
        return None
    return spread_layers(num_layers)


def spread_layers(num_layers: int) -> tuple[int, ...]:
    """A third of the layers: every second one, from about where a gate looks last."""
    return tuple(range(round(num_layers / 3), num_layers, 2))[: num_layers // ONE_IN]


def layer_kinds(text: Any) -> list[str] | None:
    """The kind of every layer, as transformers names them; None if the configuration does not tell layers apart."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return None if kinds is None else [_EARLIER_NAMES.get(kind, kind) for kind in kinds]


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer's attention."""

    num_heads: int  # H
    num_kv_heads: int  # J
    head_dim: int  # D
    value_dim: int  # V, which is D but for latents (MLA), one head of which all query heads read

    def __str__(self) -> str:
        return f"{self.num_heads} heads and {self.num_kv_heads} KV heads of {self.head_dim}"


def memory_layers(text: Any) -> tuple[int, ...]:
    """The numbers of the decoder layers that memory acts in, ascending, of a language model's configuration.

    Raises:
        UnsupportedModel: no layer has attention, one is of an unknown kind, there are not as many kinds as layers, or
            the layers that see all of a prompt have different heads.
    """
    kinds, count = layer_kinds(text), text.num_hidden_layers
    own = count - (getattr(text, "num_kv_shared_layers", None) or 0)
    found = tuple(number for number in layers_with_attention(kinds, count) if number < own)
    if not have_other_heads(text) or len({_heads(text, number) for number in found}) == 1:
        return found
    full = tuple(number for number in found if kinds is not None and kinds[number] == "full_attention")
    sizes = {_heads(text, number): number for number in reversed(full)}
    if len(sizes) != 1:
        each = ", ".join(f"{heads} in layer {number}" for heads, number in reversed(sizes.items())) or "none"
        raise UnsupportedModel(f"memory needs layers of full attention with the same heads, found {each}")
    return full


def memory_heads(text: Any) -> Heads:
    """Of the layers of `memory_layers`. Raises UnsupportedModel as it does."""
    return _heads(text, memory_layers(text)[0])


def have_other_heads(text: Any) -> bool:
    """Whether a configuration may have different heads in different layers."""
    of_each = getattr(text, "num_attention_heads_per_layer", None)  # Laguna's
    return bool(getattr(text, "is_heterogeneous", False) or of_each)


def _heads(text: Any, number: int) -> Heads:
    """Of one layer."""
    if is_latent(text):
        return Heads(text.num_attention_heads, 1, key_size(text), value_size(text))
    own = text.per_layer_config[number] if getattr(text, "is_heterogeneous", False) else text
    of_each = getattr(text, "num_attention_heads_per_layer", None)
    heads = of_each[number] if of_each else own.num_attention_heads
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return Heads(heads, getattr(own, "num_key_value_heads", None) or heads, head_dim, head_dim)


def layers_with_attention(kinds: Sequence[str] | None, num_layers: int) -> tuple[int, ...]:
    """The numbers of the layers with attention, ascending; the kinds are those of `layer_kinds`.

    Raises:
        UnsupportedModel: as `memory_layers`.
    """
    if kinds is None:
        return tuple(range(num_layers))
    if len(kinds) != num_layers:
        raise UnsupportedModel(f"layer_types names the kinds of {len(kinds)} layers, and the model has {num_layers}")
    for number, kind in enumerate(kinds):
        if kind not in WITH_ATTENTION | WITHOUT_ATTENTION:
            raise UnsupportedModel(f"layer_types has the unknown kind {kind!r}, of layer {number}")
    found = tuple(number for number, kind in enumerate(kinds) if kind in WITH_ATTENTION)
    if not found:
        raise UnsupportedModel(
            f"memory needs layers with attention, found layer_types with {', '.join(sorted(set(kinds)))} alone"
        )
    return found
