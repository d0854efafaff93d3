"""Keys and values of p tokens in front of a request that begins at position 0: those of tokens at -p to -1.

Shapes: see the package; n sequences of T tokens.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from inducekv_vllm.errors import UnsupportedModel

from ..backbone.loading import decoder, key_norm
from ..backbone.model import Backbone
from ..backbone.prefix import cached_at

BY_LENGTH: Final = ("dynamic", "longrope")  # kinds of RoPE whose angles depend on the length of what is computed
PROBE: Final = 16  # tokens that are computed at two places, to see that the model takes distances alone
TOLERANCE: Final = 1e-3  # of the largest number
OF_16_BITS: Final = 0.1  # where the model is rounded


@dataclass(frozen=True)
class Prefix:
    """The keys and values of p tokens, as a cache has them."""

    keys: Tensor  # [L, J, p, D] float32, rotated
    values: Tensor  # [L, J, p, D] float32


def computed(backbone: Backbone, embeddings: Tensor) -> Prefix:
    """The prefix of p tokens with these embeddings [p, d], by one forward pass."""
    p = len(embeddings)
    found = cached_at(backbone, torch.arange(-p, 0)[None], inputs_embeds=embeddings[None].to(backbone.model.dtype))
    return Prefix(found.keys[:, 0], found.values[:, 0])


def moved(backbone: Backbone, cached: Prefix) -> Prefix:
    """The prefix whose p tokens have these keys and values in the cache of a request that begins at position p."""
    return Prefix(rotated(backbone, cached.keys, -cached.keys.shape[2]), cached.values)


def rotated(backbone: Backbone, keys: Tensor, by: int) -> Tensor:
    """Keys [L, J, p, D] after the model's own RoPE for the position `by`, which may be negative; of one length."""
    L, _, p, _ = keys.shape
    embeddings = torch.zeros(p, 1, backbone.hidden_size, dtype=backbone.model.dtype)
    with _given(backbone, keys):
        found = cached_at(backbone, torch.full((p, 1), by), inputs_embeds=embeddings)  # each token is a sequence
    turned = found.keys[..., 0, :].transpose(1, 2)  # [L, J, p, D]
    # YaRN scales by a factor as well, which what comes from a cache has already.
    before, after = (each.flatten(1).norm(dim=1) for each in (keys, turned))  # [L]
    return turned * torch.where(after > 0, before / after, 1.0).view(L, 1, 1, 1)


def require_distances(backbone: Backbone) -> None:
    """Check that the model's attention sees distances between tokens alone, in every layer.

    Raises:
        UnsupportedModel: says what it has.
    """
    text = backbone.model.config.get_text_config(decoder=True)
    if (found := backbone.merged_refusal) is not None:
        raise UnsupportedModel(f"an imported memory needs full attention in every layer, found {found}")
    if backbone.num_layers != text.num_hidden_layers:
        raise UnsupportedModel(
            f"an imported memory needs keys and values in every layer, found them in {backbone.num_layers} of "
            f"{text.num_hidden_layers}"
        )
    kinds = _kinds_of_rope(getattr(text, "rope_parameters", None))
    if not kinds:
        raise UnsupportedModel("an imported memory needs RoPE, whose keys can be moved, found other positions")
    if by_length := sorted(kinds & set(BY_LENGTH)):
        raise UnsupportedModel(
            f"an imported memory needs RoPE with fixed angles: those of {by_length[0]!r} depend on the length of a "
            "request, which the source has counted with its virtual tokens"
        )
    _probe(backbone)


def _probe(backbone: Backbone) -> None:
    """Compute a few random tokens at two places."""
    table = decoder(backbone.model).get_input_embeddings().weight
    some = torch.randint(len(table), (PROBE,), generator=torch.Generator().manual_seed(0))
    positions, embeddings = torch.arange(PROBE)[None], table[some][None]
    try:
        here = cached_at(backbone, positions, inputs_embeds=embeddings)
        there = cached_at(backbone, positions - PROBE, inputs_embeds=embeddings)
        turned = rotated(backbone, here.keys[:, 0], -PROBE)
    except (IndexError, RuntimeError) as error:
        raise UnsupportedModel(f"an imported memory cannot be moved in this model: {error}") from error
    within = TOLERANCE if backbone.model.dtype is torch.float32 else OF_16_BITS
    pairs = ((here.hidden, there.hidden), (here.values, there.values), (turned, there.keys[:, 0]))
    if not all(torch.allclose(a, b, rtol=0, atol=within * float(a.abs().max())) for a, b in pairs):
        raise UnsupportedModel(
            "an imported memory needs attention to distances alone, and this model computes something else for the "
            "same tokens at other positions"
        )


def _kinds_of_rope(parameters: Any) -> set[str]:
    """Of all layers; empty without RoPE."""
    if not isinstance(parameters, Mapping):
        return set()
    of_layers = [each for each in parameters.values() if isinstance(each, Mapping)]
    return {str(each.get("rope_type", "default")) for each in of_layers or [parameters]}


@contextlib.contextmanager
def _given(backbone: Backbone, keys: Tensor) -> Iterator[None]:
    """Inside, each of p sequences of one token has these keys [L, J, p, D] in the place of its own, before RoPE."""

    def give(own: Tensor) -> Any:  # [J, p, D]
        def hook(module: torch.nn.Module, arguments: Any, output: Tensor) -> Tensor:
            return own.transpose(0, 1).reshape(output.shape).to(output)

        return hook

    handles = []
    try:
        attention: Any
        for own, attention in zip(keys, backbone.attention_layers(), strict=True):
            handles.append((key_norm(attention) or attention.k_proj).register_forward_hook(give(own)))
        yield
    finally:
        for handle in handles:
            handle.remove()
