"""Decisions about the requests of a worker: what a bundle's gate, index and facts say about a prompt, and when.

    begin_step    facts alone need nothing but the prompt's words
    in the pass   a gate has all that it looks at once its last layer k has computed its values: entries that act from
                  the last prompt token on, and do nothing before layer k, join the forward pass there
    after_pass    any other request is decided after its pass, and computes again what the memory changes
    attached      the decisions leave with the step's output

To join the pass takes one rank, because others could not wait for the first one's decision in the middle of it, and a
pass outside a CUDA graph, because a replayed graph calls nothing.

A decision that raises, whatever it raises, ends its own request with an error.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from ..attention.memory_attention import MemoryAttention
from ..attention.resident_bundle import ResidentBundle
from ..backbone.fact_reader import AskedQuestion
from ..bundle.activation import first_active_position
from ..bundle.lookup import BundleIndex, LookupResult, QueryFeatures
from ..facts import FactFound, FactMissed
from ..forbidden import why_forbidden
from ..gate import WordScores
from ..protocol import DECISIONS, Decided, DecideSpec, Decision, Failed, InjectionSpec, TaskAdapter, Untouched
from ..vllm_seams.runner import StepRows
from .prompts import PromptReader, failure_of
from .requests import AskedMemory, Phase, WorkerRequest, WorkerRequests, acting_rows

Output = ModelRunnerOutput | AsyncModelRunnerOutput


class Deciding:
    """Decides on the first rank: ranks cannot disagree."""

    def __init__(self, placeholders: Collection[int]) -> None:
        """`placeholders` are the ids of tokens that stand for media."""
        self._placeholders = placeholders

    def decide(self, request: WorkerRequest) -> Decided:
        """Wait for what the prompt tells, and decide about each memory."""
        try:
            return Decided(tuple(self._decisions(request)))
        except Exception as error:
            return _failed(error)

    def _decisions(self, request: WorkerRequest) -> Iterator[Decision]:
        began, is_found = time.perf_counter(), False
        told = request.features.wait(len(request.memories))
        asked = asked_of(request)
        for memory, features in zip(request.memories, told, strict=True):
            decision = self._decision(request, memory, features, asked, looks_for_fact=not is_found)
            now = time.perf_counter()
            yield replace(decision, seconds=now - began)
            began, is_found = now, is_found or decision.fact is not None

    def _decision(
        self,
        request: WorkerRequest,
        memory: AskedMemory,
        features: QueryFeatures,
        asked: AskedQuestion | None,
        *,
        looks_for_fact: bool,
    ) -> Decision:
        """`looks_for_fact`: no memory before this one has one."""
        assert isinstance(memory.spec, DecideSpec)
        index, facts = memory.bundle.index, memory.bundle.facts if looks_for_fact else None
        features = with_words(features, memory.bundle.words, asked)
        lookup = index.lookup(features, memory.spec.top_k)
        gate, retrieval = lookup.gate_decision, lookup.retrieval
        tasks = () if gate is None else gate.fact_tasks
        found = None if facts is None or asked is None else facts.find(memory.spec.asked, asked, tasks)
        if isinstance(found, FactFound) and found.withheld is None:
            found = replace(found, withheld=why_forbidden(request.params, found.token_ids))
        return Decision(
            outcome=outcome_of(index, memory.spec, lookup, request.prompt, self._placeholders),
            task=gate.task if gate is not None else None,
            margins=tuple(gate.margins.tolist()) if gate is not None else None,
            similarity=retrieval.similarity if retrieval is not None else None,
            fact=found if isinstance(found, FactFound) else None,
            missed=found if isinstance(found, FactMissed) else None,
        )


def _failed(error: Exception) -> Decided:
    return Decided((Decision(Failed(str(failure_of(error)))),))


def asked_of(request: WorkerRequest) -> AskedQuestion | None:
    """What a request asks, for bundles with facts or a gate that looks at words."""
    reader = next((bundle.reader for bundle in request.bundles if bundle.reader is not None), None)
    return None if reader is None else reader.question(request.prompt)


def with_words(features: QueryFeatures, words: WordScores | None, asked: AskedQuestion | None) -> QueryFeatures:
    """With the evidence of a question's words behind that of its values, for a gate that looks at words."""
    if features.evidence is None or words is None or asked is None:
        return features
    return replace(features, evidence=np.concatenate([features.evidence, words.evidence(asked.text)]))


def outcome_of(
    index: BundleIndex, spec: DecideSpec, lookup: LookupResult, token_ids: Sequence[int], placeholders: Collection[int]
) -> Untouched | InjectionSpec | TaskAdapter:
    """What the request goes on with: entries, or the adapter of its task."""
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
        first_active=first_active_position(activation, token_ids, placeholders),
        expired=lookup.num_expired,
    )


class StepDecisions:
    """See the module docstring. The worker calls every method in the order of its steps."""

    def __init__(
        self,
        requests: WorkerRequests,
        prompts: PromptReader,
        deciding: Deciding | None,
        attention: MemoryAttention,
        *,
        is_alone: bool,
    ) -> None:
        """
        Args:
            deciding: on the first rank; None on the others, which only help it to read the prompts.
            is_alone: whether this rank is the only one. Others would not hear in time of what is decided early.
        """
        self._requests, self._prompts, self._deciding = requests, prompts, deciding
        self._attention, self._is_alone = attention, is_alone

    # ---- the moments of a step, in their order -------------------------------------------------------------------

    def begin_step(self, rows: StepRows) -> None:
        """Decide for facts alone, and arrange for what can be decided in the step's forward pass. Its rows have begun.

        Either is of a prompt that the step completes.
        """
        if self._deciding is None or not self._is_alone or not self._requests.any_undecided:
            return
        may_join, by_layer = rows.graph_rows is None, defaultdict[int, list[WorkerRequest]](list)
        for request in self._completing(rows):
            if self._needs_words_alone(request):
                request.decided = self._taken_up(request, self._deciding.decide(request).changed(same_pass=True))
            elif may_join and (layer := _deciding_layer(request)) is not None:
                by_layer[layer].append(request)
        for layer, requests in by_layer.items():
            self._attention.decide_in(layer, partial(self._decide_in, layer, requests, rows))

    def after_pass(self, rows: StepRows, final_hidden: Callable[[int], Tensor | None]) -> None:
        """Read the prompts that are complete. The step's forward pass is queued.

        Args:
            final_hidden: the step's final hidden states [rows, d] by their number.
        """
        if not self._requests.any_undecided:
            return
        hidden, starts = None, rows.starts
        for number, request_id in enumerate(rows.request_ids):
            if (request := self._undecided(request_id)) is not None and request.needs_key:
                hidden = final_hidden(starts[-1]) if hidden is None else hidden
                assert hidden is not None
                request.features.add(hidden[starts[number] : starts[number + 1]])
        complete = list(self._completing(rows))
        self._prompts.read([request for request in complete if request.decided is None])
        for request in complete:
            request.phase = Phase.COMPLETE

    def attached(self, output: Output) -> Output:
        """The step's output, with the first rank's decisions about the prompts that the step has completed."""
        complete = [request for request in self._requests.by_id.values() if request.phase is Phase.COMPLETE]
        for request in complete:
            request.phase = Phase.SETTLED
        if not complete or self._deciding is None:
            return output
        decide = partial(_decide_all, self._deciding, complete)
        if isinstance(output, AsyncModelRunnerOutput):
            return _DecidedLater(output, decide)
        return _attach(output, decide())

    # ---- in the forward pass -------------------------------------------------------------------------------------

    def _decide_in(self, layer: int, requests: Sequence[WorkerRequest], rows: StepRows) -> None:
        assert self._deciding is not None
        self._prompts.read(requests)
        for request, decided in [(request, self._deciding.decide(request)) for request in requests]:
            request.decided = decided
            if joins(request, decided, layer):
                request.decided = self._taken_up(request, decided.changed(same_pass=True))
        if any(request.decided is not None and request.decided.same_pass for request in requests):
            self._attention.begin_step(rows, acting_rows(self._requests.by_id, rows))

    def _taken_up(self, request: WorkerRequest, decided: Decided) -> Decided:
        """A decision that the running step's later work follows."""
        try:
            self._requests.take_up(request, decided)
        except Exception as error:
            return _failed(error)
        return decided

    def _needs_words_alone(self, request: WorkerRequest) -> bool:
        def needs(bundle: ResidentBundle) -> bool:
            return bundle.facts is not None and bundle.gate is None and not bundle.num_entries

        return bool(request.bundles) and all(needs(bundle) for bundle in request.bundles)

    def _undecided(self, request_id: str) -> WorkerRequest | None:
        request = self._requests.by_id.get(request_id)
        return None if request is None or request.phase is not Phase.UNDECIDED else request

    def _completing(self, rows: StepRows) -> Iterator[WorkerRequest]:
        """The requests whose last prompt token is in this step."""
        for request_id, computed, scheduled in zip(
            rows.request_ids, rows.num_computed, rows.num_scheduled, strict=True
        ):
            request = self._undecided(request_id)
            if request is not None and computed + scheduled >= len(request.prompt):
                yield request


def _deciding_layer(request: WorkerRequest) -> int | None:
    """The layer from which on an entry of the request's bundles could join; None if there is none."""
    gates = [bundle.gate for bundle in request.bundles if bundle.gate is not None]
    if not gates or request.needs_key:
        return None
    layer = max(gate.layers[-1] for gate in gates)
    return layer if any(_may_join(bundle, layer) for bundle in request.bundles) else None


def _may_join(bundle: ResidentBundle, layer: int) -> bool:
    acts_last = "generation" in bundle.index.metadata.activations.values()
    return bundle.facts is not None or (acts_last and bool((bundle.first_layers >= layer).any()))


def joins(request: WorkerRequest, decided: Decided, layer: int) -> bool:
    """Whether only the last prompt token changes, from this layer on. A stored answer is said behind the last layer."""
    T = len(request.prompt)
    if not request.bundles or decided.adapter is not None or decided.redo_from(T) != T - 1:
        return False
    entries = [[entry for entry, _ in decision.entries] for decision in decided.each]
    acting = zip(request.bundles, entries, strict=True)
    return all(bool((bundle.first_layers[own] >= layer).all()) for bundle, own in acting)


def _decide_all(deciding: Deciding, complete: Sequence[WorkerRequest]) -> dict[str, Decided]:
    return {request.id: request.decided or deciding.decide(request) for request in complete}


class _DecidedLater(AsyncModelRunnerOutput):
    """Decides when vLLM waits for the step's tokens anyway."""

    def __init__(self, output: AsyncModelRunnerOutput, decide: Callable[[], dict[str, Decided]]) -> None:
        self._output, self._decide = output, decide

    def get_output(self) -> ModelRunnerOutput:
        return _attach(self._output.get_output(), self._decide())

    def get_kv_connector_output(self) -> Any:
        """vLLM asks for it since 0.33, if `get_output` fails."""
        return self._output.get_kv_connector_output()  # type: ignore[attr-defined]


def _attach(output: Any, decisions: dict[str, Decided]) -> ModelRunnerOutput:
    setattr(output, DECISIONS, decisions)
    return output  # type: ignore[no-any-return]
