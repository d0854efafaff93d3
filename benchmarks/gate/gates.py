"""The gates that are measured: those that a stream has at its end, or a bundle's own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.continual.presets import FOLDER as PRESETS
from benchmarks.continual.suites import Suite
from inducekv_vllm.bundle import Gate, read_bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone.model import Backbone
from selector.data.choice import choose_anchors
from selector.data.examples import Example
from selector.gate.fit import fit_gate

ANCHORS = 64  # of each earlier task


@dataclass(frozen=True)
class MeasuredGate:
    gate: Gate
    facts: dict[str, Any]  # JSON values: where it comes from, and what it took

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.gate.tensors().values())


def order_of(suite: Suite) -> Suite:
    """The suite's tasks in the order of its preset, which may leave some out; in its own if there is none."""
    preset = PRESETS / f"{suite.name}.toml"
    order = tomllib.loads(preset.read_text(encoding="utf-8")).get("order") if preset.is_file() else None
    return suite.ordered(order) if order else suite


def fitted(backbone: Backbone, suite: Suite, seed: int, misses: float) -> MeasuredGate:
    """The gate after the last task of the stream."""
    found = fit_gate(backbone, questions_at_the_end(suite, seed), suite.base.train, misses=misses, seed=seed)
    prices = {f"{price.misses:g}": price.opened for price in found.prices}
    return MeasuredGate(found.gate, {"seed": seed, "misses": misses, "seconds": dict(found.seconds), "prices": prices})


def questions_at_the_end(suite: Suite, seed: int) -> Mapping[str, Sequence[Example]]:
    """By task: anchors of the earlier ones, and what the last one is learned from."""
    *earlier, last = suite.tasks
    unread = torch.empty(0)  # "random" reads no keys
    own: dict[str, Sequence[Example]] = {}
    for task in earlier:
        own[task.name] = [task.train[row] for row in choose_anchors(task.train, ANCHORS, "random", seed, keys=unread)]
    return own | {last.name: [*last.train, *last.validation]}


def of_bundle(path: Path, backbone: Backbone) -> MeasuredGate:
    """Raises BundleError: it is no bundle. FingerprintMismatch: of another model. ConfigError: it has no gate."""
    bundle = read_bundle(path, backbone=backbone.fingerprint)
    if bundle.gate is None:
        raise ConfigError(f"{path}: the memory has no relevance gate")
    return MeasuredGate(bundle.gate, {"bundle": str(path), "digest": bundle.digest})
