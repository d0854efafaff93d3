"""What the API process, the scheduler and the workers tell each other about one request.

    DecideSpec      API process -> scheduler, worker: the worker shall decide once it knows the prompt
    InjectionSpec   API process -> scheduler, worker: nothing needs to be decided
    Decided         worker -> scheduler -> API process, with every output of the request
    Start           scheduler -> worker, with the request's next step: what was decided

A request has one memory or two: its own, and behind it one that it shares with others. It carries a spec for each, all
of one kind, and a `Decided` has a decision about each. In a layer, the effect is own(shared(self-attention)).

Specs travel in `SamplingParams.extra_args`, the others as attributes of vLLM's step outputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from vllm.lora.request import LoRARequest

from .facts import NO_FACTS, AskedFacts, FactFound, FactMissed
from .gate import Closed

EXTRA_ARGS_KEY = "inducekv"
JUDGE = "inducekv_judge"  # in extra_args: the request asks the model to judge a fact, and goes first
DECISIONS = "inducekv_decisions"  # an attribute of ModelRunnerOutput: {request id: Decided}
STARTS = "inducekv_starts"  # an attribute of SchedulerOutput: {request id: Start}
MEDIA = "inducekv_media"  # an attribute of SchedulerOutput: {request id: vLLM's features of its prompt}
# Of what is read: nothing else has these fields.
_EXACTLY = with_config(ConfigDict(extra="forbid"))
Source = Literal["computed", "none"]
BlockKey = tuple[str, str, int]  # ours, a memory's content, the first position that it acts on


@_EXACTLY
@dataclass(frozen=True)
class InjectionSpec:
    """The worker injects k entries of a bundle."""

    bundle: str  # its digest
    entries: tuple[int, ...]  # [k]
    weights: tuple[float, ...]  # [k], alpha
    first_active: int = 0  # the first position that memory acts on; above 0 for decoupled memory only
    expired: int = 0  # entries of the bundle that the request is answered without, as if they were not there

    @property
    def block_key(self) -> BlockKey:
        """What tells the request's blocks of the KV cache from others, from that of its first active position on."""
        return "inducekv", self.content, self.first_active

    @property
    def content(self) -> str:
        """Digest of everything that decides what memory adds at a position it acts on; it identifies a memory slot."""
        parts = [self.bundle, list(self.entries), [w.hex() for w in self.weights], self.expired]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@_EXACTLY
@dataclass(frozen=True)
class TaskAdapter:
    """A LoRA adapter that vLLM can run a request with."""

    name: str
    number: int
    path: str

    @classmethod
    def of(cls, request: LoRARequest) -> TaskAdapter:
        return cls(request.lora_name, request.lora_int_id, request.lora_path)

    @property
    def lora_request(self) -> LoRARequest:
        return LoRARequest(self.name, self.number, self.path)


@_EXACTLY
@dataclass(frozen=True)
class DecideSpec:
    """The worker asks a bundle's gate and index when it knows what the prompt tells them."""

    bundle: str  # its digest
    retrieval: bool  # whether the query key for the retrieval is needed; the prompt is computed as a whole then
    top_k: int | None
    adapters: tuple[tuple[str, TaskAdapter], ...] = ()  # of the tasks that have one instead of entries
    asked: AskedFacts = NO_FACTS  # what the prompt's text asks for


Specs = tuple[DecideSpec, ...] | tuple[InjectionSpec, ...]  # in the order of the request's memories
_SPECS: TypeAdapter[Specs] = TypeAdapter(Specs)


def extra_args_of(specs: Specs) -> dict[str, Any]:
    """What a request carries; nothing for one without memory."""
    return {EXTRA_ARGS_KEY: [asdict(spec) for spec in specs]} if specs else {}


def parse_specs(extra_args: Mapping[str, Any] | None) -> Specs:
    """Parse what `extra_args_of` gives; empty for a request without memory.

    Raises:
        ValueError: the value is no list of specs of one kind.
    """
    raw = (extra_args or {}).get(EXTRA_ARGS_KEY, [])
    try:
        return _SPECS.validate_python(raw)
    except ValidationError as error:
        raise ValueError(f"extra_args[{EXTRA_ARGS_KEY!r}] is no list of specs of one kind: {raw!r}") from error


@_EXACTLY
@dataclass(frozen=True)
class Untouched:
    """The model goes on as it is. A stored answer may still be said."""

    closed: Closed | None = None  # why the gate is closed; None: it is open or absent, and there is nothing to inject


@_EXACTLY
@dataclass(frozen=True)
class Failed:
    """Nothing could be decided: the request ends with this error."""

    error: str


Outcome = Untouched | InjectionSpec | TaskAdapter | Failed


@dataclass(frozen=True)
class Decision:
    """What a memory answers a request with, and why. Metrics, traces and the audit chain read it."""

    outcome: Outcome
    source: Source = "computed"
    task: str | None = None  # the gate's; None if it is closed, or there is none
    margins: tuple[float, ...] | None = None  # of the gate's tasks, in their order; None without a gate
    similarity: float | None = None  # inner product of the query and the closest entry's key, if they were compared
    seconds: float = 0.0  # the time that gate and index took
    same_pass: bool = False  # the prompt's forward pass went on with what is decided; without it, the request goes back
    fact: FactFound | None = None  # beside any outcome but an error
    missed: FactMissed | None = None  # the nearest one, if none was found

    @property
    def error(self) -> str | None:
        """Why nothing could be decided."""
        return self.outcome.error if isinstance(self.outcome, Failed) else None

    @property
    def injection(self) -> InjectionSpec | None:
        return self.outcome if isinstance(self.outcome, InjectionSpec) else None

    @property
    def entries(self) -> Sequence[tuple[int, float]]:
        """The entries that are injected, each with its weight."""
        spec = self.injection
        return () if spec is None else list(zip(spec.entries, spec.weights, strict=True))

    @property
    def first_active(self) -> int | None:
        """The first position that the entries act on; None without entries."""
        return None if self.injection is None else self.injection.first_active

    @property
    def answer(self) -> tuple[int, ...] | None:
        """The tokens that the request says, as they are stored."""
        return None if self.fact is None or self.fact.withheld is not None else self.fact.token_ids

    @property
    def closed(self) -> Closed | None:
        """Why the gate is closed."""
        return self.outcome.closed if isinstance(self.outcome, Untouched) else None

    @property
    def verdict(self) -> Literal["none", "open"] | Closed:
        """The gate's: none without a gate, or why it is closed."""
        return "none" if self.margins is None else self.closed or "open"

    def redo_from(self, prompt_tokens: int) -> int | None:
        """The first position that has to be computed again once this is known; None if none has.

        An adapter changes every position. A stored answer is said behind the prompt: it needs its last token alone.

        Args:
            prompt_tokens: of the request.
        """
        if self.same_pass or isinstance(self.outcome, Failed):
            return None
        if isinstance(self.outcome, InjectionSpec):
            return self.outcome.first_active
        if isinstance(self.outcome, TaskAdapter):
            return 0
        return None if self.answer is None else prompt_tokens - 1


_DECISIONS: TypeAdapter[tuple[Decision, ...]] = TypeAdapter(tuple[Decision, ...])


@dataclass(frozen=True)
class Decided:
    """What a request is answered with: a decision about each of its memories, in their order."""

    each: tuple[Decision, ...]  # one alone for a request that ends with an error

    @classmethod
    def without_worker(cls, specs: Sequence[DecideSpec | InjectionSpec | None]) -> Decided | None:
        """About a request that the workers do not have to decide; None: they have to.

        Args:
            specs: one for each memory; None for one that injects nothing.
        """
        if any(isinstance(spec, DecideSpec) for spec in specs):
            return None
        return cls(tuple(Decision(spec or Untouched(), source="none") for spec in specs))  # type: ignore[arg-type]

    @property
    def error(self) -> str | None:
        """Why nothing could be decided."""
        return next((each.error for each in self.each if each.error is not None), None)

    @property
    def injections(self) -> tuple[InjectionSpec, ...]:
        return tuple(each.injection for each in self.each if each.injection is not None)

    @property
    def adapter(self) -> TaskAdapter | None:
        return next((each.outcome for each in self.each if isinstance(each.outcome, TaskAdapter)), None)

    @property
    def answer(self) -> tuple[int, ...] | None:
        """The tokens that the request says: of a fact of its own memory before one that is shared."""
        return next((each.answer for each in self.each if each.answer is not None), None)

    @property
    def same_pass(self) -> bool:
        """As that of `Decision`: memories join the pass together."""
        return any(each.same_pass for each in self.each)

    def changed(self, **changes: Any) -> Decided:
        """With the same changes of every decision."""
        return Decided(tuple(replace(each, **changes) for each in self.each))

    def missing(self, missed: Sequence[FactMissed | None]) -> Decided:
        """With the nearest fact of each memory, where none is found."""
        if self.error is not None:
            return self
        pairs = [(each, near or each.missed) for each, near in zip(self.each, missed, strict=True)]
        return Decided(tuple(each if each.fact is not None else replace(each, missed=near) for each, near in pairs))

    def redo_from(self, prompt_tokens: int) -> int | None:
        """As that of `Decision`: the first position that any of them changes."""
        found = [at for each in self.each if (at := each.redo_from(prompt_tokens)) is not None]
        return min(found, default=None)

    def start(self, prompt_tokens: int) -> Start:
        """What the request goes on with. Arguments as for `Decision.redo_from`."""
        return Start(self.redo_from(prompt_tokens), self.injections, self.adapter, self.answer)

    def pack(self) -> str:
        """As one string, which costs an output little: it is packed once, and copied."""
        return json.dumps([asdict(each) for each in self.each])

    @classmethod
    def unpack(cls, packed: str) -> Decided:
        return cls(_DECISIONS.validate_json(packed))


@dataclass(frozen=True)
class Start:
    """What a request goes on with from its next step on; nothing if its gates are closed and no fact is found."""

    redo_from: int | None = None  # the first prompt token that is computed again, if the request was computed before
    injections: tuple[InjectionSpec, ...] = ()  # in the order of the request's memories
    adapter: TaskAdapter | None = None
    answer: tuple[int, ...] | None = None  # what it says, in tokens
