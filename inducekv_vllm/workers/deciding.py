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
from ..facts import packed
from ..protocol import DECISIONS, DecideSpec, Decision, Failed, InjectionSpec, TaskAdapter, Untouched
from .undecided import Undecided, failure_of

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
        """Wait for what the prompt tells, and decide. Whatever raises ends this request, and no other."""
        began = time.perf_counter()
        try:
            decision = self._decide(request)
        except Exception as error:
            return Decision(Failed(str(failure_of(error))))
        return decision if request.bundle is None else replace(decision, seconds=time.perf_counter() - began)

    def _decide(self, request: Undecided) -> Decision:
        features = request.features()
        if request.bundle is None:
            return Decision(Untouched(), picture=None if features.picture is None else packed(features.picture))
        index, facts = request.bundle.index, request.bundle.facts
        lookup = index.lookup(features, request.spec.top_k)
        gate, retrieval = lookup.gate_decision, lookup.retrieval
        if gate is not None and features.evidence is not None:
            self._gate_log.note(index.token_digest, features.evidence, gate.task)
        expiry = index.next_expiry()
        found = None
        if facts is not None:
            found = facts.find(request.token_ids, () if gate is None else gate.fact_tasks, features.picture)
        return Decision(
            outcome=outcome_of(index, request.spec, lookup, request.token_ids, self._placeholders),
            task=gate.task if gate is not None else None,
            margins=tuple(gate.margins.tolist()) if gate is not None else None,
            similarity=retrieval.similarity if retrieval is not None else None,
            valid_until=expiry.timestamp() if expiry is not None else None,
            facts=found,
        )


def outcome_of(
    index: MemoryIndex, spec: DecideSpec, lookup: MemoryLookup, token_ids: Sequence[int], placeholders: Collection[int]
) -> Untouched | InjectionSpec | TaskAdapter:
    """What the request goes on with: entries, or the adapter of its task.

    With `spec.remainder`, entries that were not retrieved stay in the softmax with alpha = 0. It has no effect for the
    weighting "prior", in which alpha = 0 removes an entry.
    """
    gate = lookup.gate_decision
    task = None if gate is None else gate.task
    if (adapter := dict(spec.adapters).get(task or "")) is not None:
        return adapter
    if (retrieval := lookup.retrieval) is None:
        return Untouched(None if gate is None else gate.closed)
    activation = index.metadata.activation_of(task)
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
