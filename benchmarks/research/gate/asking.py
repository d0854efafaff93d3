"""The gates that are measured, and what they decide on the questions of the protocol, in transformers."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.research.continual.presets import FOLDER as PRESETS
from benchmarks.research.continual.suites import Suite
from benchmarks.research.gate.protocol import STYLES, other_questions, own_questions
from inducekv_vllm.bundle import Gate, read_bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.gate import Closed
from selector.backbone.model import Backbone
from selector.backbone.token_values import evidence_of_prompts
from selector.data.choice import choose_anchors
from selector.data.examples import Example
from selector.gate.data import GateData
from selector.gate.encoding import encode_questions
from selector.gate.fit import fit_gate
from selector.gate.fitting_set import GateQuestion
from selector.gate.settings import GateOptions, Kind

AT_ONCE: Final = 256  # questions whose token values are held
NEAR_MISSES: Final = {"demo": "demo", "demo-search": "demo", "real-text": "text", "real-pictures": "pictures"}


@dataclass(frozen=True)
class Asked:
    """What one gate decided on one question."""

    kind: str
    task: str | None  # the question's own; None: of no task
    routed: str | None  # the task that it was sent to
    closed: Closed | None = None  # why it was sent to none


def protocol_questions(suite: Suite, tests: int | None) -> Iterator[GateQuestion]:
    """All that the protocol asks about a suite: the same questions of every gate.

    Args:
        tests: test questions of each task and of the base, at most; None for all.
    """
    for task in suite.tasks:
        yield from own_questions(task.name, task.train, task.test[:tests], Random(f"protocol {task.name}"))
    train = {task.name: task.train for task in suite.tasks}
    yield from other_questions(NEAR_MISSES[suite.name], train, suite.base.test[:tests], Random("protocol"))


def ask(backbone: Backbone, gates: Sequence[Gate], questions: Iterable[GateQuestion]) -> list[list[Asked]]:
    """What each gate decides on each question."""
    decided: list[list[Asked]] = [[] for _ in gates]
    left = iter(questions)
    while part := list(itertools.islice(left, AT_ONCE)):
        encoded = encode_questions(backbone, part, STYLES)
        for gate, asked in zip(gates, decided, strict=True):
            rule = gate.rule
            for question, evidence in zip(part, evidence_of_prompts(backbone, gate, encoded).numpy(), strict=True):
                decision = rule.decide(evidence)
                asked.append(Asked(question.kind, question.task, decision.task, decision.closed))
    return decided


ANCHORS = 64  # of each earlier task


@dataclass(frozen=True)
class MeasuredGate:
    gate: Gate
    details: dict[str, Any]  # JSON values: where it comes from, and what it took

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.gate.tensors().values())


def order_of(suite: Suite) -> Suite:
    """The suite's tasks in the order of its preset, which may leave some out; in its own if there is none."""
    preset = PRESETS / f"{suite.name}.toml"
    order = tomllib.loads(preset.read_text(encoding="utf-8")).get("order") if preset.is_file() else None
    return suite.ordered(order) if order else suite


def fitted(backbone: Backbone, suite: Suite, seed: int, misses: float | None, kind: Kind | None = None) -> MeasuredGate:
    """The gate after the last task of the stream."""
    data = GateData(questions_at_the_end(suite, seed), suite.base.train)
    found = fit_gate(backbone, data, GateOptions(misses, seed, kind))
    prices = {f"{price.misses:g}": price.opened for price in found.prices}
    return MeasuredGate(
        found.gate, {"seed": seed, "misses": found.misses, "seconds": dict(found.seconds), "prices": prices}
    )


def questions_at_the_end(suite: Suite, seed: int) -> Mapping[str, Sequence[Example]]:
    """By task: anchors of the earlier ones, and what the last one is learned from."""
    *earlier, last = suite.tasks
    own: dict[str, Sequence[Example]] = {}
    for task in earlier:
        own[task.name] = choose_anchors(task.train, ANCHORS, seed)
    return own | {last.name: [*last.train, *last.validation]}


def of_bundle(path: Path, backbone: Backbone) -> MeasuredGate:
    """Raises BundleError: it is no bundle. FingerprintMismatch: of another model. ConfigError: it has no gate."""
    bundle = read_bundle(path, backbone=backbone.fingerprint)
    if bundle.gate is None:
        raise ConfigError(f"{path}: the memory has no relevance gate")
    return MeasuredGate(bundle.gate, {"bundle": str(path), "digest": bundle.digest})
