"""Decisions in the forward pass that completes a prompt, which then goes on with the memory.

A gate has all that it looks at once its last layer k has computed its values. Entries that act from the last prompt
token on, and do nothing before layer k, join the pass there: its token stands, and nothing is computed twice.

It takes one rank, because others could not wait for the first one's decision in the middle of a pass, and a pass
outside a CUDA graph, because a replayed graph calls nothing. And the last prompt token must not end a block of the KV
cache: the scheduler has shared the prompt's full blocks before the decision. Any other request is decided after its
pass, and computes its last token again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..attention.memory_attention import MemoryAttention
from ..facts import Answers
from ..host.runner import StepRows
from ..protocol import Decision, InjectionSpec, TaskAdapter
from .deciding import Deciding
from .undecided import Undecided, UndecidedRequests

Requests = Sequence[tuple[str, Undecided]]


class SamePass:
    """See the module docstring."""

    def __init__(
        self,
        undecided: UndecidedRequests,
        deciding: Deciding,
        attention: MemoryAttention,
        inject: Callable[[str, InjectionSpec], None],
        answer: Callable[[str, Answers], None],
        block_size: int,
    ) -> None:
        """
        Args:
            inject: gives a request the memory that the running step and all later ones read.
            answer: gives it the stored answers that its next tokens follow.
            block_size: tokens of a KV-cache block.
        """
        self._undecided, self._deciding, self._attention = undecided, deciding, attention
        self._inject, self._answer, self._block_size = inject, answer, block_size

    def begin_step(self, rows: StepRows) -> None:
        """Look for requests that can be decided in this step's forward pass. Its rows have begun."""
        if rows.graph_rows is not None:
            return
        by_layer = defaultdict[int, list[tuple[str, Undecided]]](list)
        for request_id, request in self._undecided.completing(rows):
            layer = _deciding_layer(request)
            if layer is not None and len(request.token_ids) % self._block_size:
                by_layer[layer].append((request_id, request))
        for layer, requests in by_layer.items():
            self._attention.decide_in(layer, partial(self._decide, layer, requests, rows))

    def _decide(self, layer: int, requests: Requests, rows: StepRows) -> None:
        for _, request in requests:
            self._undecided.find(request)
        decisions = [self._deciding.decide(request) for _, request in requests]
        for (request_id, request), decision in zip(requests, decisions, strict=True):
            joins = _joins(request, decision, layer)
            request.decision = replace(decision, same_pass=joins)
            if joins and decision.injection is not None:
                self._inject(request_id, decision.injection)
            if joins and decision.facts is not None:
                self._answer(request_id, decision.facts.answers)
        if any(request.decision is not None and request.decision.same_pass for _, request in requests):
            self._attention.begin_step(rows)


def _deciding_layer(request: Undecided) -> int | None:
    """The layer from which on an entry of the request's bundle could join; None if there is none."""
    if (bundle := request.bundle) is None or (gate := bundle.gate) is None or request.spec.retrieval:
        return None
    layer = gate.layers[-1]
    acts_last = "generation" in bundle.index.metadata.activations.values()
    if bundle.facts is not None or (acts_last and bool((bundle.first_layers >= layer).any())):
        return layer
    return None


def _joins(request: Undecided, decision: Decision, layer: int) -> bool:
    """Whether only the last prompt token changes, from this layer on. Stored answers enter behind the last layer."""
    T = len(request.token_ids)
    if request.bundle is None or isinstance(decision.outcome, TaskAdapter) or decision.redo_from(T) != T - 1:
        return False
    entries = [entry for entry, _ in decision.entries]
    return bool((request.bundle.first_layers[entries] >= layer).all())
