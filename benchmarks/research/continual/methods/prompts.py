"""What rivals with routers share: each request is decided on once, from its prompt, and answered with that decision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from inducekv_vllm.backbone.placeholders import placeholder_ids
from selector.backbone.loading import decoder
from selector.backbone.model import Backbone, Inputs
from selector.backbone.scoring import Scorer
from selector.data.examples import Example

Decision = TypeVar("Decision")
# What generation gives the model beside the processor's inputs, encoded pictures (`mm_encoder_outputs`) among them.
OF_GENERATION = {"position_ids", "cache_position", "past_key_values", "use_cache", "logits_to_keep", "return_dict"}


class WholePrompts(Scorer):
    """Runs the whole model at every step: what is decided on a prompt does not reach the tails of examples."""

    def _has_tails(self, example: Example, first_active: int) -> bool:
        return False


class PromptHook(Generic[Decision]):
    """Calls `decide` with each batch of prompts as it enters the model, and keeps what it returns for their answers.

    `decide` may run the model itself: such a pass is not decided on.
    """

    def __init__(self, backbone: Backbone, decide: Callable[[Inputs], Decision]) -> None:
        self.decided: Decision | None = None
        self.decoding = False  # a step of a generation, after its prompts
        self.deciding = False  # a pass of `decide`
        self._decide = decide
        backbone.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.deciding:
            return
        cache = kwargs.get("past_key_values")
        self.decoding = cache is not None and cache.get_seq_length() > 0
        if self.decoding:
            return
        inputs = {name: kwargs[name] for name in kwargs if name not in OF_GENERATION}
        if inputs.get("attention_mask") is None:  # generation leaves out a mask without zeros
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        self.deciding = True
        try:
            self.decided = self._decide(inputs)
        finally:
            self.deciding = False


@torch.no_grad()
def embedded(backbone: Backbone, inputs: Inputs) -> Tensor:
    """The first layer's input, text and encoded pictures, of n prompts: [n, T, d]."""
    seen: list[Tensor] = []

    def keep(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise _FirstLayerReached

    handle = decoder(backbone.model).layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with contextlib.suppress(_FirstLayerReached):
            backbone.model(**inputs, use_cache=False)
    finally:
        handle.remove()
    return seen[0]


class _FirstLayerReached(Exception):
    pass


def text_tokens(backbone: Backbone, inputs: Inputs) -> Tensor:
    """Which tokens of n prompts are text, neither padding nor a picture: [n, T] bool."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    return mask & ~picture_tokens(backbone, ids)


def picture_tokens(backbone: Backbone, ids: Tensor) -> Tensor:
    """[n, T] bool."""
    marks = torch.tensor(sorted(placeholder_ids(backbone.model.config)), dtype=ids.dtype, device=ids.device)
    return torch.isin(ids, marks)


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen tokens, [n, d] float32 of values [n, T, d] and chosen [n, T]; 0 of none."""
    weights = chosen.float()[:, :, None]
    return (values.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
