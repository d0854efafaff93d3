"""The facts' benchmarks: policies of a full bundle by brute force, whose facts count, extracted entries."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.research.facts import full, pictures
from benchmarks.research.facts.behind_gate import counting, table
from benchmarks.research.facts.extracted import Entries, with_answer
from inducekv_vllm.gate import GateDecision
from selector.backbone.model import Backbone
from selector.data.examples import Example
from tests.bundles import random_gate
from tests.tiny_families import FAMILIES


def store(count: int, seed: int = 0) -> full.Store:
    vectors = np.random.default_rng(seed).normal(size=(count, 8))
    made = full.Store(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    made.there = list(range(count))
    return made


def test_what_a_fact_adds_to_coverage() -> None:
    """By determinants with it and without."""
    made = store(6)
    whole = np.linalg.slogdet(np.eye(6) + made.cosines)[1]
    for place, gain in enumerate(full.log_det(made, 0.0)):
        without = np.delete(np.delete(made.cosines, place, 0), place, 1)
        assert gain == pytest.approx(whole - np.linalg.slogdet(np.eye(5) + without)[1], abs=1e-9)


def test_the_closest_of_all_goes_first() -> None:
    made = store(6)
    cosines = made.cosines - 2 * np.eye(6)
    assert int(full.k_center(made, 0.0).argmin()) in np.unravel_index(cosines.argmax(), cosines.shape)


def test_use_decides_and_what_is_new_stays() -> None:
    made = store(4)
    made.uses[:], made.last[:], made.taught[:] = [5, 1, 1, 0], [9, 3, 8, 1000], [0, 0, 0, 999]
    assert np.argsort(full.lately(made, 1000.0)).tolist() == [1, 2, 0, 3]
    assert np.argsort(full.used(made, 1000.0)).tolist() == [1, 2, 0, 3]
    assert np.argsort(full.newest(made, 1000.0)).tolist() == [0, 1, 2, 3]
    assert np.argsort(full.first(made, 1000.0)).tolist() == [3, 2, 1, 0]


def test_a_small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all, everything is served; the oldest of a fading demand are hardly missed."""
    vectors = store(60).vectors
    for name, value in (("ROOM", 20), ("FACTS_AT_ONCE", 2), ("FADES_IN", 2)):
        monkeypatch.setattr(full, name, value)
    shares = {policy: full.served(policy, vectors, "fading", 0) for policy in full.POLICIES}
    assert shares["newest"] > 0.99
    assert shares["first"] < 0.2
    monkeypatch.setattr(full, "ROOM", 58)
    assert full.served("lately", vectors, "steady", 0) == 1.0


def test_whose_facts_count() -> None:
    gate = random_gate(tasks=("a", "b"))
    closed = GateDecision(None, np.array([-1.0, -2.0]), "outside", ("a",))
    assert [list(counting(rule, closed, gate)) for rule in ("open", "near", "words")] == [[None], ["a"], ["a", "b"]]
    rows = [{"task": "a", "kind": "x", "open": open_, "near": 1.0, "words": 1.0} for open_ in (0.0, 0.5)]
    assert table(rows).splitlines()[-1] == "| x | a | 0.250 | 1.000 | 1.000 |"


def test_extracted_entries_are_read_for_the_chosen_examples_alone(tmp_path: Path) -> None:
    backbone = Backbone.load(FAMILIES["llama"](tmp_path))
    examples = [
        Example(f"{n}", "t", ({"role": "user", "content": [{"type": "text", "text": text}]},), (), "yes", "")
        for n, text in enumerate(("Is it one?", "Is it perhaps two?"))
    ]
    entries = Entries.of(backbone, examples)
    first, second = entries.places
    assert (first.start, first.stop, second.stop) == (0, second.start, len(entries.memory.retrieval_keys))
    tokens = [backbone.encode(with_answer(each).messages, [])["input_ids"].shape[1] for each in examples]
    assert all(0 < len(place) <= count for place, count in zip(entries.places, tokens, strict=True))
    terms = entries.terms([[1], [0, 1]])
    assert torch.equal(terms.log_weight[0].isfinite(), torch.arange(second.stop) >= second.start)
    assert bool(terms.log_weight[1].isfinite().all())


class Shown:
    """Things of one colour each."""

    def kinds(self, concept: Any) -> dict[str, pictures.Picture]:
        shown = Image.new("RGB", (48, 48), concept.colour)
        return {kind: changed(shown) for kind, changed in pictures.KINDS.items()}

    def of(self, concept: Any) -> pictures.Picture:
        return self.kinds(concept)["the same picture"]


class ByColour:
    """Finds what has exactly the stored colour."""

    offline = SimpleNamespace(unload_bundle=lambda memory: None)

    def teach(self, shown: Any) -> Any:
        return {each.getpixel((24, 24)): name for name, each in shown.items()}

    def found(self, memory: Any, shown: Any) -> list[str | None]:
        return [memory.get(each.getpixel((24, 24))) for each in shown]


def test_shares_of_pictures() -> None:
    """A brighter picture of one thing is the other's colour; half of the unknown ones look like a known one."""
    colours = {"a": (100, 0, 0), "b": (110, 0, 0), "c": (0, 100, 0), "d": (100, 0, 0)}
    things: Any = [SimpleNamespace(name=name, colour=colour) for name, colour in colours.items()]
    for seed in range(100):
        if [each.name for each in Random(seed).sample(things, 4)] == ["a", "b", "c", "d"]:
            break
    asked: Any = ByColour()
    drawn: Any = Shown()
    rows = {row["picture"]: row for row in pictures.measure(asked, drawn, things, 2, seed)}
    assert [rows["the same picture"][name] for name in ("right", "wrong", "unknown")] == [1.0, 0.0, 0.5]
    assert [rows["10% brighter"][name] for name in ("right", "wrong", "unknown")] == [0.0, 0.5, 0.5]
    assert rows["cropped by 4%"]["right"] == 1.0
