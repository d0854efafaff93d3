"""What the API process, the scheduler and the workers tell each other about one request.

    DecideSpec      API process -> scheduler, worker: the worker shall decide once it knows the prompt
    InjectionSpec   API process -> scheduler, worker: nothing needs to be decided
    Decision        worker -> scheduler -> API process, with the request's first output
    Start           scheduler -> worker, with the request's next step: what was decided

The first two travel in `SamplingParams.extra_args`, the others as attributes of vLLM's step outputs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from vllm.lora.request import LoRARequest

from ..facts import Answers, FactsFound
from ..gate import Closed

EXTRA_ARGS_KEY = "inducekv"
DECISIONS = "inducekv_decisions"  # an attribute of ModelRunnerOutput: {request id: Decision}
STARTS = "inducekv_starts"  # an attribute of SchedulerOutput: {request id: Start}
LEAST_DELAY_S, LONGEST_DELAY_S = 0.002, 0.02
Source = Literal["computed", "cached", "none"]


def poll_delays() -> Iterator[float]:
    """Seconds to wait between questions whether the workers have done what they do in the background.

    A tenth of the time since this call, so that the answer comes little later than the end of the work.
    """
    began = time.monotonic()
    return (min(max(LEAST_DELAY_S, (time.monotonic() - began) / 10), LONGEST_DELAY_S) for _ in itertools.count())


@dataclass(frozen=True)
class InjectionSpec:
    """The worker injects k entries of a bundle."""

    bundle: str  # its digest
    entries: tuple[int, ...]  # [k]
    weights: tuple[float, ...]  # [k], alpha
    remainder: bool
    start: int = 0  # the first position that memory acts on; above 0 for decoupled memory only
    expired: int = 0  # entries of the bundle that the request is answered without, as if they were not there

    @property
    def content(self) -> str:
        """Digest of everything that decides what memory adds at a position it acts on; it identifies a memory slot."""
        parts = [self.bundle, list(self.entries), [w.hex() for w in self.weights], self.remainder, self.expired]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def to_extra_args(self) -> dict[str, Any]:
        return {**asdict(self), "entries": list(self.entries), "weights": list(self.weights)}

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> InjectionSpec:
        entries, weights = tuple(map(int, raw["entries"])), tuple(map(float, raw["weights"]))
        return cls(str(raw["bundle"]), entries, weights, bool(raw["remainder"]), int(raw["start"]), int(raw["expired"]))


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


@dataclass(frozen=True)
class DecideSpec:
    """The worker asks a bundle's gate and index when it knows what the prompt tells them."""

    bundle: str  # its digest; empty if the worker shall only read what the prompt's pictures are like
    retrieval: bool  # whether the query key for the retrieval is needed; the prompt is computed as a whole then
    top_k: int | None
    remainder: bool
    owner: str = ""  # who may share the decision
    adapters: tuple[tuple[str, TaskAdapter], ...] = ()  # of the tasks that have one instead of entries

    def to_extra_args(self) -> dict[str, Any]:
        return {**asdict(self), "adapters": [[task, asdict(adapter)] for task, adapter in self.adapters]}

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> DecideSpec:
        adapters = tuple((str(task), TaskAdapter(**adapter)) for task, adapter in raw["adapters"])
        top_k = None if raw["top_k"] is None else int(raw["top_k"])
        return cls(
            str(raw["bundle"]), bool(raw["retrieval"]), top_k, bool(raw["remainder"]), str(raw["owner"]), adapters
        )


PICTURE_SPEC: Final = DecideSpec(bundle="", retrieval=False, top_k=None, remainder=False)


def parse_spec(extra_args: Mapping[str, Any] | None) -> DecideSpec | InjectionSpec | None:
    """Parse the output of `to_extra_args` under `EXTRA_ARGS_KEY`; None for a request without memory.

    Raises:
        ValueError: the value is neither of the two specs.
    """
    raw = (extra_args or {}).get(EXTRA_ARGS_KEY)
    if raw is None:
        return None
    for spec in (DecideSpec, InjectionSpec):
        if isinstance(raw, Mapping) and raw.keys() == set(spec.__dataclass_fields__):
            return spec.parse(raw)
    raise ValueError(f"extra_args[{EXTRA_ARGS_KEY!r}] is neither of the two specs: {raw!r}")


@dataclass(frozen=True)
class Decision:
    """What a request is answered with, and why. Metrics, spans, traces and the audit chain read it."""

    injection: InjectionSpec | None  # None: nothing is injected
    source: Source = "computed"
    task: str | None = None  # the gate's; None if it is closed, or there is none
    margins: tuple[float, ...] | None = None  # of the gate's tasks, in their order; None without a gate
    closed: Closed | None = None  # why the gate is closed
    similarity: float | None = None  # inner product of the query and the closest entry's key, if they were compared
    seconds: float = 0.0  # the time that gate and index took
    valid_until: float | None = None  # in seconds since the epoch: an entry expires then
    error: str | None = None  # why nothing could be decided
    same_pass: bool = False  # the prompt's forward pass went on with what is decided; without it, the request goes back
    facts: FactsFound | None = None
    picture: str | None = None  # the packed state of the prompt's pictures, if that is all that was asked for

    @property
    def verdict(self) -> Literal["none", "open"] | Closed:
        """The gate's: none without a gate, or why it is closed."""
        return "none" if self.margins is None else self.closed or "open"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "injection": self.injection and self.injection.to_extra_args()}

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Decision:
        injection, margins, facts = raw["injection"], raw["margins"], raw["facts"]
        return cls(
            **{
                **raw,
                "injection": None if injection is None else InjectionSpec.parse(injection),
                "margins": None if margins is None else tuple(margins),
                "facts": None if facts is None else FactsFound.parse(facts),
            }
        )


@dataclass(frozen=True)
class Start:
    """What a request goes on with from its next step on; nothing if its gate is closed and no fact is found."""

    position: int  # of the first prompt token that is computed again, if any is
    injection: InjectionSpec | None = None
    adapter: TaskAdapter | None = None
    answers: Answers | None = None
    media: Sequence[Any] | None = None  # vLLM's features of the prompt, if the worker has to have their data again
