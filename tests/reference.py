"""What a server must answer, computed by `selector.backbone`, which shares no attention code with the plugin."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.bundle import Bundle
from inducekv_vllm.bundle.activation import first_active_position
from inducekv_vllm.retrieval.entry_terms import EntryTerms
from selector.backbone import injection
from selector.backbone.gate_rule import routed_tasks, routing
from selector.backbone.generation import score
from selector.backbone.injection import TensorMemory, Terms
from selector.backbone.model import Backbone, Inputs
from selector.backbone.token_values import evidence_of_prompts


@torch.no_grad()
def reference_logprobs(
    backbone: Backbone,
    bundle: Bundle | None,
    prompt: Inputs,
    token_ids: Sequence[int],
    *,
    beneath: Bundle | None = None,
    top_k: int | None = None,
    remainder: bool = False,
) -> Tensor:
    """The log-probabilities that a server with this bundle must give to `token_ids` after a prompt: [tokens] float32.

    Runs both passes: query key and evidence from the untouched model, then the tokens under the retrieved memory, or
    under the untouched model if the bundle's relevance gate is closed.

    Args:
        beneath: the bundle that the request shares with others; `bundle` acts on what its memory has made.
    """
    active = bundle and _active(backbone, bundle, prompt, top_k, remainder)
    shared = beneath and _active(backbone, beneath, prompt, None, False)

    def scored() -> Tensor:
        if active is None or shared is None:
            return score(backbone, [prompt], [token_ids], *(active or shared or ()))[0]
        with _beneath(*shared):
            return score(backbone, [prompt], [token_ids], *active)[0]

    acting = [
        (of.digest, str(acts[1].first_active)) for of, acts in ((bundle, active), (beneath, shared)) if of and acts
    ]
    return _once(backbone, prompt, (*acting, top_k, remainder, tuple(token_ids)), scored)


_KNOWN: WeakKeyDictionary[Any, dict[Hashable, Tensor]] = WeakKeyDictionary()  # by model


def _once(backbone: Backbone, prompt: Inputs, what: Hashable, computed: Callable[[], Tensor]) -> Tensor:
    """Tests ask the same alone, in a batch, and again of the prefix cache."""
    known = _KNOWN.setdefault(backbone.model, {})
    key = what, *((name, sha256(each.numpy().tobytes()).digest()) for name, each in prompt.items())
    if key not in known:
        known[key] = computed()
    return known[key]


def _active(
    backbone: Backbone, bundle: Bundle, prompt: Inputs, top_k: int | None, remainder: bool
) -> tuple[TensorMemory, Terms] | None:
    """What acts on a prompt; None if the bundle's gate is closed."""
    memory = TensorMemory.from_bundle(bundle, device=backbone.device)
    evidence = torch.zeros(1, 0) if bundle.gate is None else reference_evidence(backbone, bundle, prompt)[None]
    is_open, log_prior = routing(bundle, evidence)
    if not is_open[0]:
        return None
    query_keys = reference_key(backbone, prompt)[None]
    terms = memory.terms(query_keys, top_k=top_k, remainder=remainder, log_prior=log_prior)
    if memory.form == "decoupled":
        activation = bundle.metadata.activation_of(routed_tasks(bundle, log_prior)[0])
        placeholders = placeholder_ids(backbone.model.config)
        start = first_active_position(activation, prompt["input_ids"][0].tolist(), placeholders)
        terms = replace(terms, first_active=torch.tensor([start]))
    return memory, terms


@contextmanager
def _beneath(memory: TensorMemory, terms: Terms) -> Iterator[None]:
    """Within the context, the output of every self-attention has this decoupled memory already."""
    plain = injection.own_attention

    def with_memory(*layer: Any, **options: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch, injection.injected(memory, terms):
            patch.setattr(injection, "own_attention", plain)
            return injection.attention(*layer, **options)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(injection, "own_attention", with_memory)
        yield


def reference_evidence(backbone: Backbone, bundle: Bundle, prompt: Inputs) -> Tensor:
    """The evidence [H] float32 that a server must find for one prompt."""
    gate = bundle.gate
    assert gate is not None
    return _once(backbone, prompt, (bundle.digest, "gate"), lambda: evidence_of_prompts(backbone, gate, [prompt])[0])


def reference_key(backbone: Backbone, prompt: Inputs) -> Tensor:
    """The query key [d] float32 of one prompt."""
    return _once(backbone, prompt, "key", lambda: backbone.retrieval_keys(prompt)[0])


def terms_from_pages(pages: Sequence[EntryTerms], num_entries: int) -> Terms:
    """The selector's terms from the `entry_terms` of the entries that n requests have retrieved."""
    shape = (len(pages), num_entries)
    key_scale, value_scale = torch.zeros(shape), torch.zeros(shape)
    log_weight = torch.full(shape, -math.inf)
    for row, page in enumerate(pages):
        entries = torch.from_numpy(page.entries)
        key_scale[row, entries] = torch.from_numpy(page.key_scale)
        log_weight[row, entries] = torch.from_numpy(page.log_weight)
        value_scale[row, entries] = torch.from_numpy(page.value_scale)
    return Terms(key_scale, log_weight, value_scale, torch.tensor([page.log_remainder for page in pages]))
