"""Decisions: what a bundle's gate, index and facts say about a prompt, attached to the step that has completed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from ..bundle.activation import first_active_position
from ..bundle.lookup import MemoryIndex, MemoryLookup
from ..engine.gate_log import GateLog
from ..engine.wire import DECISIONS, DecideSpec, Decision, InjectionSpec
from ..errors import InduceKVError
from ..facts import packed
from .undecided import Undecided

Completed = Sequence[tuple[str, Undecided]]


class Deciding:
    """Decides on the first rank: ranks cannot disagree."""

    def __init__(self, placeholders: Collection[int], gate_log: GateLog) -> None:
        """`placeholders` are the ids of tokens that stand for media."""
        self._placeholders, self._gate_log = placeholders, gate_log

    def attached(
        self, output: ModelRunnerOutput | AsyncModelRunnerOutput, completed: Completed
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """A step's output, with decisions about the prompts that it has completed."""
        if isinstance(output, AsyncModelRunnerOutput):
            return _DecidedLater(output, lambda: self._decide_all(completed))
        return _attach(output, self._decide_all(completed))

    def close(self) -> None:
        self._gate_log.close()

    def _decide_all(self, completed: Completed) -> dict[str, Decision]:
        return {request_id: request.decision or self.decide(request) for request_id, request in completed}

    def decide(self, request: Undecided) -> Decision:
        """Wait for what the prompt tells, and decide."""
        began = time.perf_counter()
        try:
            features = request.features()
            if request.bundle is None:
                return Decision(None, picture=None if features.picture is None else packed(features.picture))
            index = request.bundle.index
            lookup = index.lookup(features, request.spec.top_k)
        except InduceKVError as error:
            return Decision(None, error=str(error))
        gate, retrieval, facts = lookup.gate_decision, lookup.retrieval, request.bundle.facts
        if gate is not None and features.evidence is not None:
            self._gate_log.note(index.token_digest, features.evidence, gate.task)
        expiry = index.next_expiry()
        decision = Decision(
            injection=injection_of(index, request.spec, lookup, request.token_ids, self._placeholders),
            task=gate.task if gate is not None else None,
            margins=tuple(gate.margins.tolist()) if gate is not None else None,
            closed=gate.closed if gate is not None else None,
            similarity=retrieval.similarity if retrieval is not None else None,
            valid_until=expiry.timestamp() if expiry is not None else None,
            facts=None
            if facts is None
            else facts.find(request.token_ids, () if gate is None else gate.fact_tasks, features.picture),
        )
        return replace(decision, seconds=time.perf_counter() - began)


def injection_of(
    index: MemoryIndex, spec: DecideSpec, lookup: MemoryLookup, token_ids: Sequence[int], placeholders: Collection[int]
) -> InjectionSpec | None:
    """What is injected; None if the gate is closed or sends the request to a task that has an adapter.

    With `spec.remainder`, entries that were not retrieved stay in the softmax with alpha = 0. It has no effect for the
    weighting "prior", in which alpha = 0 removes an entry.
    """
    if (retrieval := lookup.retrieval) is None:
        return None
    activation = index.metadata.activation_of(lookup.gate_decision.task if lookup.gate_decision is not None else None)
    return InjectionSpec(
        bundle=index.metadata.digest,
        entries=tuple(retrieval.entries.tolist()),
        weights=tuple(retrieval.weights.tolist()),  # float32 to float64 is exact
        remainder=spec.remainder and index.metadata.weighting == "sqrt",
        start=first_active_position(activation, token_ids, placeholders),
        expired=lookup.num_expired,
    )


class _DecidedLater(AsyncModelRunnerOutput):
    """Decides when vLLM waits for the step's tokens anyway."""

    def __init__(self, output: AsyncModelRunnerOutput, decide: Callable[[], dict[str, Decision]]) -> None:
        self._output, self._decide = output, decide

    def get_output(self) -> ModelRunnerOutput:
        return _attach(self._output.get_output(), self._decide())


def _attach(output: Any, decisions: dict[str, Decision]) -> ModelRunnerOutput:
    setattr(output, DECISIONS, decisions)
    return output  # type: ignore[no-any-return]
