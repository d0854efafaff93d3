"""Scoring from the first layer on, or from the first token that memory acts on: what comes before is computed once.

The first layer's input, which holds the encoded pictures, depends neither on a memory nor on adapters of the layers. If
memory acts late, the prefix before its first active token is the untouched model's too. Both are kept, and a step of
training computes the tail alone: the active tokens of the prompt, and the answer.

A hybrid has tails of whole prompts alone: a state cannot go back to the end of a prefix.

Shapes: n examples, P prefix tokens, t tail tokens, a answer tokens, L layers, J KV heads, D head size, d hidden size.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from inducekv_vllm.backbone.memory_layers import memory_layers

from .generation import answer_logprobs, forward_with_answers, injecting
from .injection import TensorMemory, Terms
from .loading import decoder
from .model import Backbone, Inputs

# Largest difference of log-probabilities with which a model counts as one that can be computed tail by tail: the
# rounding of float32 sums, or some steps of the model's own dtype.
LEAST_TOLERANCE: Final = 1e-3
DTYPE_STEPS: Final = 32


@dataclass(frozen=True)
class Tail:
    """One example from its first active token on, and the untouched model's cache of what comes before."""

    keys: Tensor  # [L, P, J, D], rotated
    values: Tensor  # [L, P, J, D]
    hidden: Tensor  # [t, d], the first layer's input
    cos: Tensor  # [t, D], of the rotation
    sin: Tensor  # [t, D]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values, self.hidden, self.cos, self.sin))


@torch.no_grad()
def has_tails(backbone: Backbone, prompt: Inputs, answer: Sequence[int], first_active: int) -> bool:
    """Whether the model's layers, norm and head, called one by one, give what the model gives for this example."""
    with torch.autocast(backbone.device.type, enabled=False):
        try:
            tail = compute_tail(backbone, prompt, answer, first_active)
            (alone,) = tail_logprobs(backbone, [tail], [len(answer)])
        except (AttributeError, KeyError, TypeError):  # its layers are built in another way
            return False
        (whole,) = answer_logprobs(backbone, [prompt], [answer])
    tolerance = max(LEAST_TOLERANCE, DTYPE_STEPS * torch.finfo(backbone.model.dtype).eps)
    return torch.allclose(alone, whole, rtol=0, atol=tolerance)


@torch.no_grad()
def compute_tail(backbone: Backbone, prompt: Inputs, answer: Sequence[int], first_active: int) -> Tail:
    """The tail of one prompt with its answer, from position `first_active` on; in the model's own precision."""
    cache, seen = DynamicCache(), dict[str, Any]()

    def keep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs, hidden=args[0] if args else kwargs["hidden_states"])
        if first_active == 0:
            raise _FirstLayerReached  # no prefix is needed

    handle = decoder(backbone.model).layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with contextlib.suppress(_FirstLayerReached), torch.autocast(backbone.device.type, enabled=False):
            forward_with_answers(backbone, [prompt], [answer], past_key_values=cache, use_cache=True)
    finally:
        handle.remove()
    if seen["position_embeddings"][0].ndim != 3:
        raise TypeError("the rotation depends on more than a token's row")  # several kinds of positions: Qwen2.5-VL
    hidden: Tensor
    hidden, cos, sin = (part[0, first_active:].clone() for part in (seen["hidden"], *seen["position_embeddings"]))

    numbers = memory_layers(backbone.model.config.get_text_config(decoder=True))

    def prefix(name: str) -> Tensor:
        if first_active == 0:
            return hidden.new_empty(backbone.num_layers, 0, backbone.num_kv_heads, backbone.head_dim)
        layers = [cache.layers[number] for number in numbers]
        return torch.stack([getattr(layer, name)[0, :, :first_active].transpose(0, 1) for layer in layers])

    return Tail(prefix("keys"), prefix("values"), hidden, cos, sin)


class _FirstLayerReached(Exception):
    """Ends a forward pass."""


def tail_logprobs(
    backbone: Backbone,
    tails: Sequence[Tail],
    answer_lengths: Sequence[int],
    memory: TensorMemory | None = None,
    terms: Terms | None = None,
) -> list[Tensor]:
    """log p(every token) at each answer token's position, as `answer_logprobs`; memory acts on every tail token.

    Returns:
        For each of n tails [a, vocabulary] float32, differentiable.
    """
    network = decoder(backbone.model)
    hidden = pad_sequence([tail.hidden for tail in tails], batch_first=True)  # [n, t, d]
    position_embeddings = tuple(
        pad_sequence([getattr(tail, name) for tail in tails], batch_first=True) for name in ("cos", "sin")
    )
    past = [
        pad_sequence([getattr(tail, name).transpose(0, 1) for tail in tails], batch_first=True).permute(2, 0, 3, 1, 4)
        for name in ("keys", "values")
    ]  # [L, n, J, P, D]
    cache = DynamicCache(list(zip(*past, strict=True))) if past[0].shape[3] else None
    with_attention = set(memory_layers(backbone.model.config.get_text_config(decoder=True)))
    visible = _visible([tail.keys.shape[1] for tail in tails], hidden.shape[1]).to(hidden.device)
    with injecting(memory, terms):
        for number, layer in enumerate(network.layers):
            output = layer(
                hidden,
                attention_mask=visible if number in with_attention else None,
                past_key_values=cache,
                use_cache=cache is not None,
                position_embeddings=position_embeddings,
            )
            hidden = output[0] if isinstance(output, tuple) else output
    head, norm = backbone.model.get_output_embeddings(), getattr(network, "norm", None) or network.embedding_norm
    firsts = [tail.hidden.shape[0] - length - 1 for tail, length in zip(tails, answer_lengths, strict=True)]
    spans = zip(firsts, answer_lengths, strict=True)  # a span begins where the first answer token is predicted
    predicting = torch.cat([hidden[row, first : first + length] for row, (first, length) in enumerate(spans)])
    logits = head(norm(predicting))  # of all tails at once: autocast casts the head's weights in each product
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    return list(logprobs.split(list(answer_lengths)))


def _visible(prefix_lengths: Sequence[int], tail_length: int) -> Tensor:
    """Which prefix and tail tokens each tail token sees: [n, 1, t, P + t] bool."""
    P = max(prefix_lengths)
    prefix = torch.arange(P) < torch.tensor(prefix_lengths)[:, None]  # [n, P]
    own = torch.ones(tail_length, tail_length, dtype=torch.bool).tril()  # [t, t]
    n = len(prefix_lengths)
    return torch.cat([prefix[:, None].expand(n, tail_length, P), own.expand(n, -1, -1)], dim=-1)[:, None]
