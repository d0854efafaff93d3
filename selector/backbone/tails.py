"""Scoring from the first layer on, or from the first token that memory acts on: what comes before is computed once.

The first layer's input, which holds the encoded pictures, depends neither on a memory nor on adapters of the layers. If
memory acts late, the prefix before its first active token is the untouched model's too. Both are kept, and a step of
training computes the tail alone: the active tokens of the prompt, and the answer.

A hybrid's other layers begin with the state that they have after the prefix. Right padding changes no earlier state.

Shapes: n examples, P prefix tokens, t tail tokens, a answer tokens, L layers, J KV heads, D head size, d hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from inducekv_vllm.backbone.memory_layers import memory_layers

from .generation import answer_logprobs, forward_with_answers, injecting
from .injection import TensorMemory, Terms
from .loading import decoder
from .model import TOKEN_INPUTS, Backbone, Inputs

# Largest difference of log-probabilities with which a model counts as one that can be computed tail by tail: the
# rounding of float32 sums, or some steps of the model's own dtype.
LEAST_TOLERANCE: Final = 1e-3
DTYPE_STEPS: Final = 32
# Of a hybrid's tail: of larger ones so few are kept that whole prompts are computed instead.
MAX_STATE_BYTES: Final = 2**24


@dataclass(frozen=True)
class State:
    """What a layer without attention keeps of P tokens."""

    convolution: Tensor  # [channels, width]
    recurrence: Tensor | None  # None: the layer is a convolution


@dataclass(frozen=True)
class Tail:
    """One example from its first active token on, and the untouched model's cache of what comes before."""

    keys: Tensor  # [L, P, J, D], rotated
    values: Tensor  # [L, P, J, D]
    hidden: Tensor  # [t, d], the first layer's input
    cos: Tensor  # [t, D], of the rotation
    sin: Tensor  # [t, D]
    states: Mapping[int, State] = field(default_factory=dict)  # of the layers without attention, by their number

    @property
    def state_bytes(self) -> int:
        parts = (part for state in self.states.values() for part in (state.convolution, state.recurrence))
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        own = sum(tensor.nbytes for tensor in (self.keys, self.values, self.hidden, self.cos, self.sin))
        return own + self.state_bytes


class _KeptState(LinearAttentionLayer):
    """The states that n tails begin with. Those that follow are not kept.

    transformers' own layer would write them over what the backward pass needs.
    """

    def __init__(self, states: Sequence[State]) -> None:
        super().__init__()
        recurrences = [state.recurrence for state in states if state.recurrence is not None]
        self._convolutions = torch.stack([state.convolution for state in states])  # [n, channels, width]
        self.conv_states[0] = self._convolutions
        self.recurrent_states[0] = torch.stack(recurrences) if recurrences else None
        self.conv_kernel_size[0] = self._convolutions.shape[-1]
        self.has_previous_state[0] = True
        self.record_past = True  # else a step of one token is computed by another function, which writes

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        return torch.cat([self._convolutions, conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return recurrent_states


@torch.no_grad()
def has_tails(backbone: Backbone, prompt: Inputs, answer: Sequence[int], first_active: int) -> bool:
    """Whether the model's layers, norm and head, called one by one, give what the model gives for this example."""
    with torch.autocast(backbone.device.type, enabled=False):
        try:
            tail = compute_tail(backbone, prompt, answer, first_active)
            if tail.state_bytes > MAX_STATE_BYTES:
                return False
            (alone,) = tail_logprobs(backbone, [tail], [len(answer)])
        except (AttributeError, KeyError, TypeError):  # its layers are built in another way
            return False
        (whole,) = answer_logprobs(backbone, [prompt], [answer])
    tolerance = max(LEAST_TOLERANCE, DTYPE_STEPS * torch.finfo(backbone.model.dtype).eps)
    return torch.allclose(alone, whole, rtol=0, atol=tolerance)


@torch.no_grad()
def compute_tail(backbone: Backbone, prompt: Inputs, answer: Sequence[int], first_active: int) -> Tail:
    """The tail of one prompt with its answer, from position `first_active` on; in the model's own precision."""
    text, has_states = backbone.model.config.get_text_config(decoder=True), backbone.has_states
    cache, seen = DynamicCache(config=text) if has_states else DynamicCache(), dict[str, Any]()

    def keep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs, hidden=args[0] if args else kwargs["hidden_states"])
        if first_active == 0 or has_states:
            raise _FirstLayerReached  # no prefix is needed, or one that ends before memory acts

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

    if has_states and first_active:
        before = {name: each[:, :first_active] if name in TOKEN_INPUTS else each for name, each in prompt.items()}
        with torch.autocast(backbone.device.type, enabled=False):
            backbone.model(**before, past_key_values=cache, use_cache=True)
    numbers = memory_layers(text)

    def prefix(name: str) -> Tensor:
        if first_active == 0:
            return hidden.new_empty(backbone.num_layers, 0, backbone.num_kv_heads, backbone.head_dim)
        layers = [cache.layers[number] for number in numbers]
        return torch.stack([getattr(layer, name)[0, :, :first_active].transpose(0, 1) for layer in layers])

    others = sorted(set(range(len(cache.layers))) - set(numbers)) if first_active else ()
    states = {number: _state(cache.layers[number]) for number in others}
    return Tail(prefix("keys"), prefix("values"), hidden, cos, sin, states)


def _state(layer: Any) -> State:
    recurrence = layer.recurrent_states[0]
    return State(layer.conv_states[0][0].clone(), None if recurrence is None else recurrence[0].clone())


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
    cache = _cache(past, tails) if past[0].shape[3] else None
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


def _cache(past: Sequence[Tensor], tails: Sequence[Tail]) -> DynamicCache:
    """What n tails begin with.

    Args:
        past: keys and values [L, n, J, P, D].
    """
    cache = DynamicCache(list(zip(*past, strict=True)))
    for number in sorted(tails[0].states):  # ascending, so that the layers before have their places
        cache.layers.insert(number, _KeptState([tail.states[number] for tail in tails]))
    return cache


def _visible(prefix_lengths: Sequence[int], tail_length: int) -> Tensor:
    """Which prefix and tail tokens each tail token sees: [n, 1, t, P + t] bool."""
    P = max(prefix_lengths)
    prefix = torch.arange(P) < torch.tensor(prefix_lengths)[:, None]  # [n, P]
    own = torch.ones(tail_length, tail_length, dtype=torch.bool).tril()  # [t, t]
    n = len(prefix_lengths)
    return torch.cat([prefix[:, None].expand(n, tail_length, P), own.expand(n, -1, -1)], dim=-1)[:, None]
